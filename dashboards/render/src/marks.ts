// Annotations: stretches of time in which a query had a value. Pure.

export interface Mark {
  fromMs: number;
  toMs: number;
  colour: string;
  text: string;
}

/** One mark for each stretch without a gap. */
export function marksOf(timesMs: number[], step: number, colour: string, text: string): Mark[] {
  const marks: Mark[] = [];
  for (const time of timesMs) {
    const last = marks[marks.length - 1];
    if (last !== undefined && time - last.toMs <= step) {
      last.toMs = time;
    } else {
      marks.push({fromMs: time, toMs: time, colour, text});
    }
  }
  return marks;
}
