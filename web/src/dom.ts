/** Makes elements. Texts are always set as text, so no prompt can bring markup of its own. */

type Child = Node | string | null | undefined | false;
type Value = string | number | boolean | null | undefined | EventListener;

/**
 * An element of HTML.
 *
 * @param tag Its name, with classes behind dots: "p.note".
 * @param given Attributes; functions are listeners, and null or false leaves an attribute out.
 */
export function h<T extends HTMLElement = HTMLElement>(tag: string, given: Record<string, Value> = {}, ...children: Child[]): T {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElement(name), classes, given, children) as T;
}

/** An element of SVG, in the same way. */
export function s(tag: string, given: Record<string, Value> = {}, ...children: Child[]): SVGElement {
  const [name, ...classes] = tag.split(".");
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), classes, given, children);
}

/** Put other children into an element. */
export function fill(element: Element, ...children: Child[]): void {
  element.replaceChildren(...children.filter((child): child is Node | string => Boolean(child)));
}

/** The element with this id, which the page must have. */
export function byId<T extends HTMLElement>(id: string): T {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element ${id}`);
  return found as T;
}

function filled<T extends Element>(element: T, classes: string[], given: Record<string, Value>, children: Child[]): T {
  element.classList.add(...classes);
  for (const [name, value] of Object.entries(given)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  fill(element, ...children);
  return element;
}
