// How far apart points are asked for, and how far back a rate looks: Grafana's rules. Pure.

const STEPS_MS = [
  10, 20, 50, 100, 200, 500,
  1_000, 2_000, 5_000, 10_000, 15_000, 20_000, 30_000,
  60_000, 120_000, 300_000, 600_000, 900_000, 1_200_000, 1_800_000,
  3_600_000, 7_200_000, 10_800_000, 21_600_000, 43_200_000, 86_400_000,
];

const MOST_POINTS = 11_000;
const UNITS_MS: Record<string, number> = {ms: 1, s: 1_000, m: 60_000, h: 3_600_000, d: 86_400_000};

/** Milliseconds between points: about one for each pixel, rounded, and never less than the least. */
export function stepMs(rangeMs: number, widthPx: number, leastMs: number): number {
  return Math.max(rounded(rangeMs / Math.max(widthPx, 1)), rounded(rangeMs / MOST_POINTS), leastMs);
}

/** Milliseconds that `$__rate_interval` stands for: at least four of the least steps. */
export function rateMs(step: number, leastMs: number): number {
  return Math.max(step + leastMs, 4 * leastMs);
}

/** The least step that a query has, with its variables filled in; or else the data source's. */
export function leastMs(interval: string, scrapeMs: number): number {
  const text = interval.replace(/^>/, '');
  if (text === '') {
    return scrapeMs;
  }
  const match = /^(\d+(?:\.\d+)?)(ms|[smhd])$/.exec(text);
  if (match === null) {
    throw new Error(`a least step is a time such as 30s, not ${interval}`);
  }
  return Number(match[1]) * UNITS_MS[match[2]];
}

/** To the nearest step that people read well. */
function rounded(intervalMs: number): number {
  const at = STEPS_MS.findIndex((step, index) => intervalMs <= (step + (STEPS_MS[index + 1] ?? Infinity)) / 2);
  return STEPS_MS[at];
}

/** A duration as Prometheus reads it. */
export function promDuration(ms: number): string {
  return ms % 1000 === 0 ? `${ms / 1000}s` : `${Math.ceil(ms)}ms`;
}

/** Grafana's own variables, for one query. */
export function builtIn(fromMs: number, toMs: number, step: number, leastMs: number): Record<string, string> {
  return {
    __interval: promDuration(step),
    __interval_ms: String(step),
    __rate_interval: promDuration(rateMs(step, leastMs)),
    __range: promDuration(Math.ceil((toMs - fromMs) / 1000) * 1000),
    __from: String(fromMs),
    __to: String(toMs),
  };
}
