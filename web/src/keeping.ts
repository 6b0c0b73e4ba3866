/** Keeps a run: in the address, for this tab, in a file, and as commands. */

import { type Asked, requestOf } from "./api";
import { h } from "./dom";
import { Session } from "./session";

const KEPT = "outrider-run";
/** Characters of a prompt that an address may hold. */
const LONGEST = 2000;

/** Settings by name, from the address of the page. */
export function fromAddress(): Map<string, string> {
  return new Map(new URLSearchParams(location.hash.slice(1)));
}

/** Put the settings into the address, so that it can be kept or sent. */
export function toAddress(prompt: string, settings: [string, string][]): void {
  const found = new URLSearchParams(settings);
  if (prompt.length <= LONGEST) found.set("prompt", prompt);
  history.replaceState(null, "", `#${found}`);
}

/** Keep a run until the tab is closed. */
export function keep(session: Session): void {
  try {
    sessionStorage.setItem(KEPT, JSON.stringify({ address: location.hash, run: JSON.stringify(session) }));
  } catch {
    sessionStorage.removeItem(KEPT); // too large for this browser: it is not there after a reload
  }
}

/** The run that was kept under this address. */
export function kept(): Session | null {
  try {
    const found = JSON.parse(sessionStorage.getItem(KEPT) ?? "null");
    return found?.address === location.hash ? Session.parse(found.run) : null;
  } catch {
    return null;
  }
}

/** Save a run as a file. */
export function download(session: Session): void {
  const url = URL.createObjectURL(new Blob([JSON.stringify(session)], { type: "application/json" }));
  h("a", { href: url, download: `outrider-run-${session.made.slice(0, 19).replaceAll(":", "-")}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The request as a command line. */
export function curl(asked: Asked): string {
  const { path, body: given } = requestOf(asked);
  const body = JSON.stringify(given, null, 2).replaceAll("'", "'\\''");
  return `curl ${location.origin}${path} \\\n  -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

/** The request with OpenAI's package for Python. */
export function python(asked: Asked, model: string): string {
  const { prompt, chat, max_tokens, temperature, seed, speculation } = asked;
  const lines = [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(`${location.origin}/v1`)}, api_key="none")`,
    `answer = client.${chat ? "chat." : ""}completions.create(`,
    `    model=${literal(model)},`,
    chat ? `    messages=${literal([{ role: "user", content: prompt }])},` : `    prompt=${literal(prompt)},`,
    `    max_tokens=${max_tokens},`,
    `    temperature=${temperature},`,
    ...(seed === undefined ? [] : [`    seed=${seed},`]),
    `    extra_body=${literal({ speculation })},`,
    ")",
    `print(answer.choices[0].${chat ? "message.content" : "text"})`,
  ];
  return lines.join("\n");
}

/** Texts, numbers, lists and mappings are written in Python as in JSON. */
function literal(value: unknown): string {
  return JSON.stringify(value);
}
