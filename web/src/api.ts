/** What the server is asked, and what it answers. The shapes are those of docs/reference/server.md. */

export type Origin = "plain" | "accepted" | "recovered" | "bonus";

/** A way to draft that the server was started with. */
export interface MethodFacts {
  name: string;
  num_draft_tokens: number;
  takes_tree: boolean;
  adapts: boolean;
  least_length: number;
  /** Whether it guesses for texts that a seed decides, or where nothing is drawn. */
  takes_seeds: boolean;
}

export interface Facts {
  model: string;
  max_model_len: number;
  dtype: string;
  weight_bytes: number | null;
  max_texts: number;
  /** Whether the model has a chat template. */
  chats: boolean;
  methods: MethodFacts[];
}

export interface Likely {
  token_id: number;
  text: string | null;
  target: number;
  draft: number | null;
  /** In what was drawn from after a refusal; null where no token was drawn so. */
  residual: number | null;
}

/** What could have come after one token of a round; node -1 is the last token of the text so far. */
export interface Row {
  node: number;
  likely: Likely[];
  overlap: number | null;
}

/** A coin of an acceptance rule, about a member's draw of a node. */
export interface Coin {
  node: number;
  probability: number;
  stands: boolean;
  member: number;
}

/** One proposal of a draft token by a member, which is a number among the methods of `drafted_by`. */
export interface Draw {
  node: number;
  member: number;
  law: string;
  draft_prob: number | null;
}

export interface Round {
  round: number;
  position: number;
  token_ids: number[];
  parents: number[];
  laws: string[];
  drafted_by: { method: string; first: number; end: number }[];
  draws: Draw[];
  /** Texts that shared the step, this one included. */
  num_sequences: number;
  draft_probs: (number | null)[];
  target_probs: number[];
  rule: string | null;
  /** Why the engine chose so; empty where it had no choice. */
  reason: string;
  coins: Coin[];
  accepted: number[];
  token_id: number | null;
  seconds: Record<string, number>;
  texts: (string | null)[];
  rows: Row[];
  at: number;
}

export interface Speculation {
  method: string;
  target_passes: number;
  drafts: number;
  draft_tokens: number;
  accepted_tokens: number;
  drafted_per_position: number[];
  accepted_per_position: number[];
  acceptance_rate: number;
  mean_acceptance_length: number;
  /** By stage; a run that was saved by an earlier version has none. */
  stages?: Record<string, StageCounts>;
}

/** What happened inside a stage: passes of its draft model, and tokens that its drafter guessed and the draft model kept. */
export interface StageCounts {
  passes: number;
  draft_tokens: number;
  accepted_tokens: number;
}

/** One text with its trace. */
export interface Written {
  text: string;
  tokenIds: number[];
  origins: Origin[];
  texts: string[];
  rounds: Round[];
  speculation: Speculation;
  finishReason: string;
}

/** What a text is asked for; speculation is "off" or the settings of a method. */
export interface Asked {
  prompt: string;
  /** Whether the prompt is a message, which goes through the model's chat template. */
  chat?: boolean;
  max_tokens: number;
  temperature: number;
  speculation: string | Record<string, unknown>;
  seed?: number;
  n?: number;
  ignore_eos?: boolean;
}

/** What a text gained in one message of the server: the tokens of a pass. */
export interface Piece {
  index: number;
  text: string;
  origins: Origin[];
}

/** What is done with a text while it is written. */
export interface Hearing {
  heard?: (piece: Piece) => void;
  /** Ends the text. */
  signal?: AbortSignal;
}

/** The reader ended a text. */
export class Stopped extends Error {}

/** An answer of the server that is an error, or no answer at all: then `gone` is true. */
export class ServerError extends Error {
  constructor(
    message: string,
    readonly status: number,
    readonly gone = false,
  ) {
    super(message);
  }
}

/** Codes of errors of a server that is about to end; another may come in its place. */
const LEAVING = ["shutting_down", "drain_timeout"];

let apiKey = "";

/** Send this key with every further request. */
export function useKey(key: string): void {
  apiKey = key;
}

/** Where a text is asked for, and the body of the request. */
export function requestOf({ prompt, chat, ...rest }: Asked): { path: string; body: Record<string, unknown> } {
  if (!chat) return { path: "/v1/completions", body: { prompt, ...rest } };
  return { path: "/v1/chat/completions", body: { messages: [{ role: "user", content: prompt }], ...rest } };
}

/** The model and the methods of the server. */
export async function facts(): Promise<Facts> {
  return (await answered("/pages/facts")).json();
}

/** Whether the server is there. */
export async function isAlive(): Promise<boolean> {
  try {
    return (await fetch("/health")).ok;
  } catch {
    return false;
  }
}

/**
 * Write one text, with its trace.
 *
 * @throws ServerError
 * @throws Stopped
 */
export async function write(asked: Asked, hearing: Hearing = {}): Promise<Written> {
  const [found] = await writeAll(asked, hearing);
  return found;
}

/** Write `asked.n` texts at a time. */
export async function writeAll(asked: Asked, { heard, signal }: Hearing = {}): Promise<Written[]> {
  const { path, body: given } = requestOf(asked);
  const body = JSON.stringify({ ...given, stream: true, trace: true });
  const response = await answered(path, { method: "POST", body, signal });
  const found = Array.from({ length: asked.n ?? 1 }, empty);
  for await (const event of events(response, signal)) {
    if (event.error) throw new ServerError(event.error.message, 500, LEAVING.includes(event.error.code));
    for (const choice of event.choices) {
      if (!choice.trace) continue; // a chat opens with a chunk that has no text
      const delta = choice.delta ?? {}; // thoughts come first where the server tells them apart, and are tokens like others
      const text: string = choice.text ?? `${delta.reasoning_content ?? ""}${delta.content ?? ""}`;
      take(found[choice.index], text, choice);
      heard?.({ index: choice.index, text, origins: choice.trace.origins });
    }
    if (event.speculation) for (const each of found) each.speculation = event.speculation;
  }
  if (found.some((each) => !each.finishReason)) throw new ServerError("The answer broke off in the middle.", 0, true);
  return found;
}

function empty(): Written {
  return { text: "", tokenIds: [], origins: [], texts: [], rounds: [], speculation: {} as Speculation, finishReason: "" };
}

function take(found: Written, text: string, choice: any): void {
  found.text += text;
  found.tokenIds.push(...choice.trace.token_ids);
  found.origins.push(...choice.trace.origins);
  if (choice.finish_reason) {
    found.finishReason = choice.finish_reason;
    found.rounds = choice.trace.rounds;
    found.texts = choice.trace.texts;
  }
}

async function answered(path: string, options: RequestInit = {}): Promise<Response> {
  const headers: Record<string, string> = { "content-type": "application/json" };
  if (apiKey) headers.authorization = `Bearer ${apiKey}`;
  let response: Response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    if (options.signal?.aborted) throw new Stopped();
    throw new ServerError("The server does not answer.", 0, true);
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered with status ${response.status}.`;
  throw new ServerError(message, response.status, response.status === 503);
}

/** The events of a stream. It is read to its end, so that a later stop ends no text that is there. */
async function* events(response: Response, signal?: AbortSignal): AsyncGenerator<any> {
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { done, value } = await reader.read().catch(() => {
      if (signal?.aborted) throw new Stopped();
      throw new ServerError("The server went away in the middle of the answer.", 0, true);
    });
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop()!;
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}
