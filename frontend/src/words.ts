// The words of the page for kinds and statistics.

const KIND_WORDS: Record<string, string> = {
  input: "Inputs",
  output: "Outputs",
  grad_output: "Output gradients",
  grad_input: "Input gradients",
  param: "Parameters",
  param_grad: "Parameter gradients",
  buffer: "Buffers",
  attention: "Attention",
  value: "Logged values",
};

// A name from a file may be `constructor`: only what the table itself holds counts.
const own = (table: Record<string, string>, name: string): string => (Object.hasOwn(table, name) ? table[name] ?? name : name);

export const kindWord = (kind: string): string => own(KIND_WORDS, kind);

// What a site is called: a logged value by its own name, what the model itself gives by its kind.
export function siteWord(name: string): string {
  if (name.startsWith(":value.")) return name.slice(7) || name;
  return name.startsWith(":") ? `(model) ${name.slice(1).replace(/_/g, " ")}` : name;
}

const STATISTIC_WORDS: Record<string, string> = {
  count: "number of values",
  mean: "mean",
  std: "standard deviation",
  min: "minimum",
  max: "maximum",
  absmax: "largest magnitude",
  l1: "L1 norm",
  l2: "L2 norm",
  rms: "root mean square",
  zeros: "share of zeros",
  nans: "number of NaNs",
  infs: "number of infinities",
  nonfinite: "NaNs and infinities",
  value: "value",
  "grad/weight": "gradient ÷ weight norm",
};

export const statisticWord = (name: string): string => own(STATISTIC_WORDS, name);

// What a finding is called.
const FINDING_WORDS: Record<string, string> = {
  nonfinite: "NaN or infinity",
  dead: "Nearly all zero",
  constant: "Constant output",
  saturated: "Saturation",
  exploding: "Exploding values",
  vanishing: "Vanishing gradient",
  "no-gradient": "No gradient",
  "stale-gradient": "Gradients are not set back",
  "erased-gradient": "Gradients erased before the update",
  "foreign-optimizer": "Optimizer of other parameters",
  "not-in-optimizer": "In no optimizer",
  "trains-in-eval": "Trains in evaluation mode",
  "evaluates-in-train": "Evaluates in training mode",
  "ignores-eval": "Ignores evaluation mode",
  "gradient-cut": "Graph cut",
  "learning-rate-gone": "Learning rate gone",
  "step-too-large": "Steps too large",
  "step-too-small": "Steps too small",
  "lost-updates": "Updates lost in rounding",
  "dead-units": "Dead units",
  "at-chance": "Loss at the level of chance",
  "same-batch": "The same batch",
};

// A rule that has no word here, or that somebody else brought, is called by its own name.
export const findingWord = (kind: string): string => {
  const word = own(FINDING_WORDS, kind);
  return word === kind ? kind.charAt(0).toUpperCase() + kind.slice(1).replace(/-/g, " ") : word;
};

export const MARK_WORDS = { nan: "the first NaN or infinity", spread: "has NaN or infinity", warning: "has a warning" } as const;
