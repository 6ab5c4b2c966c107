// Variables: what is chosen, and how a text that names them is filled in. Pure.
//
// Knows the forms that a value takes (in PromQL, in an address, as it is), not where it comes from.

import type {Settings, Variable} from './board';
import {builtIn, leastMs, stepMs} from './intervals';

export const ALL = '$__all';

/** What is chosen of one variable; several only where it allows that. */
export interface Chosen {
  variable: Variable;
  values: string[];
}

/** Where a link stands: the value, field and labels that `${__value…}` and `${__field…}` mean. */
export interface Spot {
  raw?: unknown;
  text?: string;
  name?: string;
  labels?: Record<string, string>;
}

export interface Scope {
  chosen: Map<string, Chosen>;
  builtIn: Record<string, string>;
  fromMs: number;
  toMs: number;
}

/** What a query is filled in with, and how far apart its points are. */
export interface Timed {
  scope: Scope;
  stepMs: number;
}

/** Of a query drawn so wide; `interval` is the least step that it, or else its panel, has. */
export function timed(interval: string | undefined, {fromMs, toMs, scrapeMs}: Settings, chosen: Map<string, Chosen>, widthPx: number): Timed {
  const least = leastMs(fill(interval ?? '', {chosen, builtIn: {}, fromMs, toMs}), scrapeMs);
  const step = stepMs(toMs - fromMs, widthPx, least);
  return {scope: {chosen, builtIn: builtIn(fromMs, toMs, step, least), fromMs, toMs}, stepMs: step};
}

const REFERENCE = /\$\{(\w+)((?:\.\w+)*)(?::(\w+))?\}|\$(\w+)/g;

/** The board's variables with `asked` chosen where it names them, and else their own choice. */
export function choose(variables: Variable[], asked: Record<string, string[]>): Map<string, Chosen> {
  const known = new Set(variables.map((variable) => variable.name));
  const unknown = Object.keys(asked).find((name) => !known.has(name));
  if (unknown !== undefined) {
    throw new Error(`no variable ${unknown} on this board; it has ${[...known].join(', ')}`);
  }
  return new Map(variables.map((variable) => [variable.name, {variable, values: asked[variable.name] ?? own(variable)}]));
}

function own(variable: Variable): string[] {
  const value = variable.current?.value;
  if (value !== undefined && value !== null) {
    return Array.isArray(value) ? value : [value];
  }
  return variable.type === 'datasource' ? ['default'] : [''];
}

export function isAll(chosen: Chosen): boolean {
  return chosen.values.includes(ALL);
}

/** Whether the text depends on a variable of which only some of all values are chosen. */
export function isNarrowed(text: string, chosen: Map<string, Chosen>): boolean {
  return [...text.matchAll(REFERENCE)].some(([, braced, , , bare]) => {
    const one = chosen.get(braced ?? bare);
    return one !== undefined && one.variable.includeAll === true && !isAll(one);
  });
}

/** What a reader sees as chosen. */
export function shown(chosen: Chosen): string {
  return isAll(chosen) ? 'All' : chosen.values.join(' + ');
}

/** The text with each variable in place; what nobody knows stays as it is, as in Grafana. */
export function fill(text: string, scope: Scope, spot: Spot = {}, format = ''): string {
  return text.replace(REFERENCE, (whole, braced, path, own, bare) => {
    const name = braced ?? bare;
    const found = lookUp(name, (path ?? '').slice(1), own ?? format, scope, spot);
    return found ?? whole;
  });
}

function lookUp(name: string, path: string, format: string, scope: Scope, spot: Spot): string | undefined {
  if (name === '__url_time_range') {
    return `from=${scope.fromMs}&to=${scope.toMs}`;
  }
  if (name === '__value') {
    return path === 'text' ? spot.text ?? '' : String(spot.raw ?? '');
  }
  if (name === '__field') {
    const label = /^labels\.(\w+)$/.exec(path);
    return label ? spot.labels?.[label[1]] ?? '' : spot.name ?? '';
  }
  if (name in scope.builtIn) {
    return scope.builtIn[name];
  }
  const chosen = scope.chosen.get(name);
  return chosen && formatted(chosen, format);
}

function formatted(chosen: Chosen, format: string): string {
  const {variable, values} = chosen;
  if (format === 'queryparam') {
    return values.map((value) => `var-${variable.name}=${encodeURIComponent(value)}`).join('&');
  }
  if (isAll(chosen)) {
    return variable.allValue ?? '.*';
  }
  if (format === 'raw' || !(variable.multi || variable.includeAll) || format !== 'promql') {
    return values.join(',');
  }
  const escaped = values.map(escapeRegex);
  return escaped.length === 1 ? escaped[0] : `(${escaped.join('|')})`;
}

/** For a regular expression inside a quoted PromQL text. */
function escapeRegex(value: string): string {
  return value.replace(/[.*+?^${}()|[\]\\]/g, '\\\\$&').replace(/"/g, '\\"');
}
