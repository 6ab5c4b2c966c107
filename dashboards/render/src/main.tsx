// The page: reads what it shall draw, draws it, and leaves `window.pdtraceReport` when it has.

import {createTheme, dateTime, type GrafanaTheme2, locationUtil, ThemeContext, type TimeRange} from '@grafana/data';
import {GlobalStyles, PortalContainer} from '@grafana/ui';
import React from 'react';
import {createRoot} from 'react-dom/client';

import type {AnnotationQuery, Settings} from './board';
import {BoardView} from './BoardView';
import {askMarks, labelValues} from './data/prometheus';
import {type Mark, marksOf} from './marks';
import {Collector, type Outcome, type Report} from './outcome';
import {type Chosen, choose, fill, isAll, type Scope, shown, timed} from './variables';

declare global {
  interface Window {
    pdtraceReport?: Report;
    pdtraceFailure?: string;
  }
}

async function main(): Promise<void> {
  const settings: Settings = await (await fetch('/settings.json')).json();
  const {board, fromMs, toMs} = settings;
  const theme = createTheme({colors: {mode: settings.theme}});
  document.body.style.background = theme.colors.background.canvas;
  const chosen = choose(board.templating.list, settings.variables);
  const {scope} = timed(undefined, settings, chosen, settings.widthPx);
  locationUtil.initialize({
    config: {appSubUrl: ''} as any,
    getVariablesUrlParams: () => ({}),
    getTimeRangeForUrl: () => ({from: String(fromMs), to: String(toMs)}),
  });
  await loadFont();
  const problems: string[] = [];
  const variables = await Promise.all([...chosen.values()].map((one) => offered(one, scope, problems)));
  const marks = (await Promise.all(board.annotations.list.map((one) => marksFor(one, settings, chosen, problems)))).flat();
  const range: TimeRange = {
    from: dateTime(fromMs), to: dateTime(toMs), raw: {from: dateTime(fromMs), to: dateTime(toMs)},
  };
  const panels = board.panels.filter((panel) => panel.type !== 'row');
  const collector = new Collector(panels.length, (outcomes) => void settled(settings, outcomes, variables, problems));
  const around = {settings, chosen, theme, range, marks, report: (outcome: Outcome) => collector.add(outcome)};
  createRoot(document.getElementById('root')!).render(
    <Themed theme={theme}>
      <BoardView board={board} around={around} />
    </Themed>,
  );
}

/** Before anything is drawn: the library measures texts, and remembers how wide they were. */
async function loadFont(): Promise<void> {
  const weights = {Regular: '400', Medium: '500'};
  await Promise.all(Object.entries(weights).map(async ([name, weight]) => {
    const font = new FontFace('Inter', `url(/public/fonts/inter/Inter-${name}.woff2)`, {weight});
    document.fonts.add(await font.load());
  }));
}

function Themed({theme, children}: {theme: GrafanaTheme2; children: React.ReactNode}): React.JSX.Element {
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      {children}
      <PortalContainer />
    </ThemeContext.Provider>
  );
}

/** How many values a variable offers; one that offers none, or not the one chosen, is a problem. */
async function offered(one: Chosen, scope: Scope, problems: string[]): Promise<Report['variables'][number]> {
  const {name, type, query} = one.variable;
  let count = 0;
  if (type === 'query') {
    try {
      const text = typeof query === 'string' ? query : query.query;
      const values = await labelValues(fill(text, scope, {}, 'promql'), scope.fromMs, scope.toMs);
      count = values.length;
      const missing = isAll(one) ? [] : one.values.filter((value) => !values.includes(value));
      if (count === 0) {
        problems.push(`variable ${name} offers no values`);
      } else if (missing.length > 0) {
        problems.push(`variable ${name} does not offer ${missing.join(', ')}; it has ${values.join(', ')}`);
      }
    } catch (error) {
      problems.push(`variable ${name}: ${(error as Error).message}`);
    }
  }
  return {name, shown: shown(one), offered: count};
}

async function marksFor(query: AnnotationQuery, settings: Settings, chosen: Map<string, Chosen>, problems: string[]): Promise<Mark[]> {
  if (!query.enable) {
    return [];
  }
  try {
    const {scope, stepMs} = timed(query.target.interval, settings, chosen, settings.widthPx);
    const expr = fill(query.target.expr, scope, {}, 'promql');
    const series = await askMarks({expr, fromMs: scope.fromMs, toMs: scope.toMs, stepMs});
    return series.flatMap(({labels, timesMs}) => {
      const text = (query.titleFormat ?? query.name).replace(/\{\{\s*(\w+)\s*\}\}/g, (_, label) => labels[label] ?? '');
      return marksOf(timesMs, stepMs, query.iconColor, text);
    });
  } catch (error) {
    problems.push(`annotation ${query.name}: ${(error as Error).message}`);
    return [];
  }
}

/** The report is left once fonts are there and what was drawn has been painted. */
async function settled(settings: Settings, panels: Outcome[], variables: Report['variables'], problems: string[]): Promise<void> {
  await document.fonts.ready;
  for (let frame = 0; frame < 3; frame++) {
    await new Promise((resolve) => requestAnimationFrame(resolve));
  }
  for (const panel of panels) {
    if (panel.verdict === 'drawn' && !painted(panel)) {
      Object.assign(panel, {verdict: 'error', message: 'it has data, and nothing of them was painted'});
    }
  }
  const order = new Map(settings.board.panels.map((panel, at) => [panel.id, at]));
  panels.sort((a, b) => order.get(a.id)! - order.get(b.id)!);
  window.pdtraceReport = {board: settings.board.uid, theme: settings.theme, variables, problems, panels};
}

/** Whether the panel's content has a plot with something in it, or text. */
function painted({id, type}: Outcome): boolean {
  const content = document.querySelector(`[data-panel="${id}"] [data-panel-content]`);
  const canvas = content?.querySelector('canvas');
  if (type === 'table') {
    return content?.querySelector('[role="gridcell"]') != null;
  }
  if (canvas) {
    const pixels = canvas.getContext('2d')!.getImageData(0, 0, canvas.width, canvas.height).data;
    return pixels.some((value) => value !== 0);
  }
  return (content?.textContent ?? '').trim() !== '';
}

main().catch((error: Error) => {
  window.pdtraceFailure = error.stack ?? error.message;
});
