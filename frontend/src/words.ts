// The words of the page for kinds and statistics.

export const KIND_WORDS: Record<string, string> = {
  input: "Inputs",
  output: "Outputs",
  grad_output: "Output gradients",
  grad_input: "Input gradients",
  param: "Parameters",
  param_grad: "Parameter gradients",
  buffer: "Buffers",
  attention: "Attention",
  value: "Named values",
};

export const kindWord = (kind: string): string => KIND_WORDS[kind] ?? kind;

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
  "grad/weight": "gradient ÷ weight norm",
};

export const statisticWord = (name: string): string => STATISTIC_WORDS[name] ?? name;

// What a finding is called.
export const FINDING_WORDS: Record<string, string> = {
  nonfinite: "NaN or infinity",
  dead: "Dead units",
  constant: "Constant output",
  saturated: "Saturation",
  exploding: "Exploding values",
  vanishing: "Vanishing gradient",
  "no-gradient": "No gradient",
};

export const MARK_WORDS = { nan: "the first NaN or infinity", spread: "has NaN or infinity", warning: "has a warning" } as const;
