// The data of one panel: its queries, transformations and field settings, in Grafana's order.

import {
  applyFieldOverrides, cacheFieldDisplayNames, type DataFrame, FieldType, type GrafanaTheme2, type ScopedVars, standardTransformers,
  standardTransformersRegistry, transformDataFrame,
} from '@grafana/data';
import {lastValueFrom} from 'rxjs';

import type {Panel, Settings, Target} from '../board';
import {distinct, type Exemplar} from '../exemplars';
import {fieldOptions} from '../fieldOptions';
import {type Chosen, fill, type Spot, timed, type Timed} from '../variables';
import {askJaeger} from './jaeger';
import {ask, askExemplars} from './prometheus';

export interface PanelData {
  frames: DataFrame[];
  exemplars: Exemplar[];
  /** Of the query whose points are farthest apart. */
  stepMs: number;
  replace: (text: string, scoped?: ScopedVars, format?: unknown) => string;
}

// Core loads each transformation when it is first used; all of them are here.
standardTransformersRegistry.setInit(() => {
  const known = new Map(Object.values(standardTransformers).map((one) => [one.id, one]));
  return [...known.values()].map((one) => ({
    id: one.id, name: one.name, transformation: () => Promise.resolve(one), editor: () => null,
  })) as any;
});

export async function load(panel: Panel, settings: Settings, chosen: Map<string, Chosen>, widthPx: number, theme: GrafanaTheme2): Promise<PanelData> {
  const targets = (panel.targets ?? []).map((target) => ({target, at: timed(target.interval ?? panel.interval, settings, chosen, widthPx)}));
  const answers = await Promise.all(targets.map(({target, at}) => one(target, at, targets.length > 1)));
  const {scope} = timed(panel.interval, settings, chosen, widthPx);
  const replace = (text: string, scoped?: ScopedVars): string => fill(text, scope, spotOf(scoped));
  let frames = answers.flatMap((answer) => answer.frames);
  if (panel.transformations?.length) {
    const context = {interpolate: (text: string) => replace(text)} as any;
    frames = await lastValueFrom(transformDataFrame(panel.transformations as any, frames, context));
  }
  frames = applyFieldOverrides({
    data: frames,
    fieldConfig: {defaults: panel.fieldConfig?.defaults ?? {}, overrides: panel.fieldConfig?.overrides ?? []},
    fieldConfigRegistry: fieldOptions,
    replaceVariables: replace,
    theme,
    timeZone: settings.timeZone,
  });
  cacheFieldDisplayNames(frames);
  return {frames, exemplars: distinct(answers.flatMap((answer) => answer.exemplars)), stepMs: Math.max(...targets.map(({at}) => at.stepMs)), replace};
}

/** How many values there are to draw. */
export function points(frames: DataFrame[]): number {
  const fields = frames.flatMap((frame) => frame.fields.filter((field) => field.type !== FieldType.time));
  return fields.reduce((sum, field) => sum + field.values.filter((value) => value !== null && value !== undefined).length, 0);
}

async function one(target: Target, {scope, stepMs}: Timed, several: boolean): Promise<{frames: DataFrame[]; exemplars: Exemplar[]}> {
  if (target.datasource.type === 'jaeger') {
    const filled = Object.fromEntries(
      Object.entries(target).map(([name, value]) => [name, typeof value === 'string' ? fill(value, scope) : value]),
    ) as unknown as Target;
    return {frames: await askJaeger(filled, scope.fromMs, scope.toMs), exemplars: []};
  }
  if (target.datasource.type !== 'prometheus') {
    throw new Error(`no data source of type ${target.datasource.type}`);
  }
  const asked = {expr: fill(target.expr ?? '', scope, {}, 'promql'), fromMs: scope.fromMs, toMs: scope.toMs, stepMs};
  const [frames, exemplars] = await Promise.all([
    ask(target, asked, several),
    target.exemplar ? askExemplars(asked) : Promise.resolve([]),
  ]);
  return {frames, exemplars};
}

function spotOf(scoped?: ScopedVars): Spot {
  const context = scoped?.__dataContext?.value;
  if (context === undefined) {
    return {};
  }
  const {field, rowIndex, calculatedValue} = context;
  const raw = rowIndex === undefined ? calculatedValue?.numeric : field.values[rowIndex];
  return {raw, text: calculatedValue?.text, name: field.name, labels: field.labels};
}
