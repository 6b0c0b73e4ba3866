/** Methods in words, as what guesses come from: the pages show no name of a setting where words are due. */

const WORDS: Record<string, string> = {
  auto: "whatever the engine chooses",
  draft_model: "a small model",
  cross_vocabulary: "a small model of another vocabulary",
  staged: "a small model that checks guesses of its own",
  early_exit: "the target's first layers",
  exit: "the target's first layers, trained to end there",
  layer_skip: "the target with layers left out",
  medusa: "trained heads, one for each place ahead",
  blockwise: "trained heads that share the target's output layer",
  eagle1: "a trained layer that foresees the target's states",
  eagle3: "a trained layer that reads the target's states",
  mtp: "layers that come with the target to predict several tokens",
  dflash: "trained layers that fill in several words at once",
  dspark: "trained layers that fill in several words at once, one after the other",
  peagle: "trained layers that guess several words in one pass",
  gemma4_assistant: "a small model that reads what the large one remembers",
  ngram: "what followed these words before",
  suffix: "the longest text that came before",
  token_recycling: "what the target held likely before",
  lookahead: "word groups tried on the side",
  prediction: "the text that was expected",
  forced: "the form of the output, which leaves no choice",
  merge: "several of these together",
  then: "several of these in turn",
};

/** A method in words. One that others brought goes by its own name. */
export function named(method: string): string {
  return WORDS[method] ?? method;
}

/** A reason of the engine, with words for the method that it begins with; the engine numbers those of one name. */
export function inWords(reason: string): string {
  return reason.replace(/^(\w+)(?: \d+)? was asked \((.*)\), and had no guess$/, (_, method, why) => `${named(method)} had no guess (${why})`);
}

/** Names in a sentence: "a", "a and b", "a, b and c". */
export function listed(names: string[]): string {
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : (names[0] ?? "");
}

/** Methods in a sentence. */
export function listedInWords(methods: string[]): string {
  return listed(methods.map(named));
}
