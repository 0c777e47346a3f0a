// The data, how its figures are written, and what layouts take on another machine.
const { rows, quantities, settings, machine } = data;
const state = {
  chosen: 0, kept: -1, order: [], listed: [], shown: rows.map(() => true),
  at: Object.fromEntries(machine.knobs.map((knob) => [knob.name, 1])), // multiples of the machine's parameters
  tokens: data.tokens || 1e12,
};

const WRITTEN = {
  s: seconds, share: percent, bytes: (v) => (v / GIB).toFixed(1) + " GiB", J: (v) => scaled(v, "J"),
  money: (v) => "$" + digits(v, 3), "": (v) => digits(v),
};
/** A figure of a row as it is filtered and drawn: GiB, percent, else as it is. */
const PLAIN = { bytes: (v) => v / GIB, share: (v) => 100 * v };

// A path through the program is a sum of what its work costs (1 / rate, or the time itself), and the step the longest
// path: convex in each cost. Between two exact steps it lies below the line that joins them. Next to the machine as it is
// it also lies above its tangent there (the exact gradient) and above the line that goes on from the two steps beyond;
// the middle of these bounds is taken.
const cost = (knob, factor) => (knob.is_rate ? 1 / factor : factor);
for (const [i, knob] of machine.knobs.entries()) {
  knob.points = [...machine.factors.map((factor, k) => ({ x: cost(knob, factor), k })), { x: 1, k: -1 }];
  knob.points.sort((a, b) => a.x - b.x);
  knob.idle = rows.every((row) => row.ratio[i].every((ratio) => Math.abs(ratio - 1) <= machine.felt));
}
function ratioAt(row, i, factor) {
  const knob = machine.knobs[i], { points } = knob, x = cost(knob, factor);
  const known = (point) => (point.k < 0 ? 1 : row.ratio[i][point.k]);
  const chord = (j) => (known(points[j + 1]) - known(points[j])) / (points[j + 1].x - points[j].x);
  const along = (j, slope) => known(points[j]) + (x - points[j].x) * slope;
  const b = Math.max(1, points.findIndex((point) => point.x >= x - 1e-12)), a = b - 1, upper = along(a, chord(a));
  if (points[a].k >= 0 && points[b].k >= 0) return upper;
  const tangent = row.elasticity[i] * (knob.is_rate ? -1 : 1);
  const lower = points[a].k < 0 ? Math.max(along(a, tangent), along(b, chord(b))) : Math.max(along(b, tangent), along(a, chord(a - 1)));
  return (upper + Math.min(upper, lower)) / 2;
}
/** The step on another machine over the step on this one; changes of several parameters add up. */
function changed(row, at) {
  let sum = 1;
  machine.knobs.forEach((knob, i) => { if ((at[knob.name] ?? 1) !== 1) sum += ratioAt(row, i, at[knob.name]) - 1; });
  return sum;
}
const turnedAway = () => machine.knobs.some((knob) => state.at[knob.name] !== 1);
const now = (row) => row.step_s * changed(row, state.at);
/** Place of the layout that is fastest on another machine. */
function fastestAt(at) {
  let best = 0;
  rows.forEach((row, i) => { if (row.step_s * changed(row, at) < rows[best].step_s * changed(rows[best], at)) best = i; });
  return best;
}
/** Largest error of `changed` where exact steps are known: [one parameter, all together]. */
function errors() {
  const worst = [0, 0];
  for (const { at, ratio } of machine.checks) {
    const which = Object.keys(at).length > 1 ? 1 : 0;
    ratio.forEach((exact, i) => {
      worst[which] = Math.max(worst[which], Math.abs(changed(rows[machine.checked[i]], at) / exact - 1));
    });
  }
  return worst;
}

/** Records count tokens. The page counts images or videos, as people do for models of these. */
const PER_TOKEN = new Set(["usd", "energy_j", "usd_per_million_tokens", "energy_per_million_tokens_j"]);
const TOKENS = new Set(["tokens_per_s", "tokens_per_s_per_device", "tokens"]);
function counted(key, value) {
  if (PER_TOKEN.has(key)) return value * data.tokens_per_unit;
  return TOKENS.has(key) ? value / data.tokens_per_unit : value;
}

const quantity = (key) => quantities.find((one) => one.key === key);
/** What may be sorted and drawn by: every quantity, the step on the machine as it is turned, every setting. */
const columns = [
  ...quantities.map((one) => ({ ...one, of: (i) => counted(one.key, rows[i][one.key]) })),
  { key: "now_s", label: "what if", unit: "s", better: "low", of: (i) => now(rows[i]) },
  ...settings.map((one) => ({ key: one.key, label: one.key, unit: null, better: "", of: (i) => rows[i].settings[one.at] })),
];
const column = (key) => columns.find((one) => one.key === key);
/** A figure of a row as the table writes it: probabilities need no decimals there. */
function cellText(one, i) {
  if (one.unit === null) return String(one.of(i));
  return one.key === "fits" ? percent(one.of(i), 0) : WRITTEN[one.unit](one.of(i));
}
const plain = (one, i) => (PLAIN[one.unit] ?? ((v) => v))(one.of(i));
