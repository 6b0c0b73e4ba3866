// What the theme's own script adds to a page can be reached by keyboard and told apart by a screen reader.
const reach = () => {
  for (const table of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) table.tabIndex = 0;
  document.querySelectorAll(".md-code__nav:not([aria-label])").forEach((buttons) => {
    buttons.setAttribute("aria-label", `Code block ${document.querySelectorAll(".md-code__nav[aria-label]").length + 1}`);
  });
};
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
reach();
