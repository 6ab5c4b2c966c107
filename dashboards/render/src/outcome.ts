// What became of each panel, for the program that opened the page.

import type {Panel} from './board';
import {type Chosen, isNarrowed} from './variables';

export type Verdict = 'drawn' | 'no data' | 'error';

export interface Outcome {
  id: number;
  title: string;
  type: string;
  verdict: Verdict;
  /** Its description says when it is empty. */
  mayBeEmpty: boolean;
  message: string;
  series: number;
  points: number;
  exemplars: number;
}

export interface Report {
  board: string;
  theme: string;
  variables: Array<{name: string; shown: string; offered: number}>;
  problems: string[];
  panels: Outcome[];
}

const EMPTY = /(^|[.:;]\s+)Empty (while|without)\b/;
const EMPTY_WHERE = /(^|[.:;]\s+)Empty where\b/;

/** "Empty while …" is about the server; "Empty where …" about what is chosen, and counts only where not all is. */
export function mayBeEmpty(panel: Panel, chosen: Map<string, Chosen>): boolean {
  const says = (panel.description ?? '').replace(/\s+/g, ' ');
  return EMPTY.test(says) || (EMPTY_WHERE.test(says) && isNarrowed(JSON.stringify(panel.targets ?? []), chosen));
}

/** Collects one outcome for each panel, and calls back when all are there. */
export class Collector {
  private readonly outcomes = new Map<number, Outcome>();

  constructor(private readonly expected: number, private readonly done: (panels: Outcome[]) => void) {}

  add(outcome: Outcome): void {
    const before = this.outcomes.get(outcome.id);
    if (before?.verdict === 'error') {
      return; // what went wrong first counts, whatever is drawn afterwards
    }
    this.outcomes.set(outcome.id, outcome);
    if (this.outcomes.size === this.expected) {
      this.done([...this.outcomes.values()]);
    }
  }
}
