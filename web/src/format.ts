/** Numbers and tokens as people read them. */

/** A probability or a share: "41.3%". */
export function percent(value: number): string {
  const hundred = value * 100;
  if (hundred >= 9.995 || hundred === 0) return `${hundred.toFixed(hundred >= 99.95 || hundred === 0 ? 0 : 1)}%`;
  return `${hundred >= 0.005 ? hundred.toFixed(2) : hundred >= 1e-6 ? hundred.toPrecision(1) : "nearly 0"}%`;
}

/** A share without decimals: "41%". */
export function roughly(value: number): string {
  return `${Math.round(value * 100)}%`;
}

/** A duration: "21.4 ms", "1.32 s". */
export function duration(seconds: number): string {
  return seconds < 1 ? `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms` : `${seconds.toFixed(2)} s`;
}

/** A factor: "2.41×". */
export function times(value: number): string {
  return `${value.toFixed(2)}×`;
}

/** Bytes: "0.72 GB". */
export function bytes(value: number): string {
  return value < 1e8 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(2)} GB`;
}

/** A whole number with its noun: "1 token", "3 tokens". */
export function count(value: number, noun: string): string {
  return `${value} ${noun}${value === 1 ? "" : noun.endsWith("ss") ? "es" : "s"}`;
}

const MARKS: Record<string, string> = { "\n": "⏎", "\t": "⇥", " ": "␣", "\r": "␍" };

/** A token in one line: what is invisible gets a sign. */
export function shown(text: string | null, tokenId?: number): string {
  if (text === null) return `#${tokenId}`;
  if (text === "") return "∅";
  if (text.includes("\ufffd")) return "part of a character";
  const lead = /^ /.test(text) && text.trim() ? `␣${text.slice(1)}` : text;
  return lead.trim() ? lead.replace(/[\n\t\r]/g, (sign) => MARKS[sign]) : signs(lead);
}

function signs(blank: string): string {
  return blank.replace(/ {2,}/g, (run) => `␣${superscript(run.length)}`).replace(/[\n\t\r ]/g, (sign) => MARKS[sign]);
}

function superscript(value: number): string {
  return [...String(value)].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(digit)]).join("");
}

/** A token in words, for those who listen. */
export function spoken(text: string): string {
  if (text.trim()) return text.trim();
  if (!text) return "nothing to see";
  const breaks = text.split("\n").length - 1;
  const spaces = text.split(" ").length - 1;
  const parts = [breaks ? count(breaks, "line break") : "", spaces ? count(spaces, "space") : ""];
  return parts.filter(Boolean).join(" and ") || "white space";
}

/** The middle of some numbers; 0 where there are none. */
export function median(values: number[]): number {
  const sorted = values.toSorted((a, b) => a - b);
  const half = sorted.length >> 1;
  if (!sorted.length) return 0;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

/** The mean; 0 where there are none. */
export function mean(values: number[]): number {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0;
}

/** A factor with the digits that a measurement bears: "2.4", "0.31", "12". */
export function factor(value: number): string {
  return value >= 9.95 ? value.toFixed(0) : value >= 0.995 ? value.toFixed(1) : value.toFixed(2);
}
