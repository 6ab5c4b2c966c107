// How far apart points are asked for, and how far back a rate looks: Grafana's rules. Pure.

const STEPS_MS = [
  1, 2, 5, 10, 20, 50, 100, 200, 500,
  1_000, 2_000, 5_000, 10_000, 15_000, 20_000, 30_000,
  60_000, 120_000, 300_000, 600_000, 900_000, 1_200_000, 1_800_000,
  3_600_000, 7_200_000, 10_800_000, 21_600_000, 43_200_000, 86_400_000,
];

/** Milliseconds between points: one for each pixel at most, never below the scrape interval. */
export function stepMs(rangeMs: number, widthPx: number, scrapeMs: number): number {
  const wanted = rangeMs / Math.max(widthPx, 1);
  const rounded = STEPS_MS.find((step) => step >= wanted) ?? STEPS_MS[STEPS_MS.length - 1];
  return Math.max(rounded, scrapeMs);
}

/** Milliseconds that `$__rate_interval` stands for: at least four scrapes. */
export function rateMs(step: number, scrapeMs: number): number {
  return Math.max(step + scrapeMs, 4 * scrapeMs);
}

/** A duration as Prometheus reads it. */
export function promDuration(ms: number): string {
  return ms % 1000 === 0 ? `${ms / 1000}s` : `${Math.ceil(ms)}ms`;
}

/** Grafana's own variables, for one panel. */
export function builtIn(fromMs: number, toMs: number, step: number, scrapeMs: number): Record<string, string> {
  return {
    __interval: promDuration(step),
    __interval_ms: String(step),
    __rate_interval: promDuration(rateMs(step, scrapeMs)),
    __range: promDuration(Math.ceil((toMs - fromMs) / 1000) * 1000),
    __from: String(fromMs),
    __to: String(toMs),
  };
}
