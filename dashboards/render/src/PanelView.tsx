// One panel: its frame, its data, what draws it, and what became of it.

import {type GrafanaTheme2, type TimeRange} from '@grafana/data';
import {PanelChrome} from '@grafana/ui';
import React, {useEffect, useState} from 'react';

import type {Panel, Settings} from './board';
import {load, type PanelData, points} from './data/loading';
import type {Mark} from './marks';
import {mayBeEmpty, type Outcome, type Verdict} from './outcome';
import {KINDS} from './panels/kinds';
import type {Chosen} from './variables';

export interface Surroundings {
  settings: Settings;
  chosen: Map<string, Chosen>;
  theme: GrafanaTheme2;
  range: TimeRange;
  marks: Mark[];
  report: (outcome: Outcome) => void;
}

interface Props {
  panel: Panel;
  width: number;
  height: number;
  around: Surroundings;
}

// Kinds that say by themselves that there is nothing: "none" is an answer.
const SAY_NOTHING = new Set(['stat', 'bargauge']);

export function PanelView({panel, width, height, around}: Props): React.JSX.Element {
  const [state, setState] = useState<{data?: PanelData; error?: string}>({});
  useEffect(() => {
    load(panel, around.settings, around.chosen, width, around.theme).then(
      (data) => setState({data}),
      (error) => setState({error: String(error.message ?? error)}),
    );
  }, []);
  return (
    <PanelChrome
      title={state.data ? state.data.replace(panel.title) : panel.title}
      description={panel.description}
      width={width}
      height={height}
      padding={panel.type === 'table' || panel.type === 'traces' ? 'none' : 'md'}
      statusMessage={state.error}
    >
      {(innerWidth, innerHeight) => (
        <Boundary report={(message) => around.report(outcome(panel, around, 'error', message))}>
          <div data-panel-content>
            <Body panel={panel} state={state} width={innerWidth} height={innerHeight} around={around} />
          </div>
        </Boundary>
      )}
    </PanelChrome>
  );
}

function Body({panel, state, width, height, around}: Props & {state: {data?: PanelData; error?: string}}): React.JSX.Element | null {
  const {data, error} = state;
  const count = data === undefined ? 0 : points(data.frames);
  const verdict: Verdict = error !== undefined ? 'error' : count > 0 ? 'drawn' : 'no data';
  useEffect(() => {
    if (error !== undefined || data !== undefined) {
      around.report(outcome(panel, around, verdict, error ?? '', data, count));
    }
  }, [state]);
  if (error !== undefined) {
    return <Said text={error} width={width} height={height} colour={around.theme.colors.error.text} />;
  }
  if (data === undefined) {
    return null;
  }
  const kind = KINDS[panel.type];
  if (kind === undefined) {
    throw new Error(`nothing here draws a panel of type ${panel.type}`);
  }
  if (verdict === 'no data' && !SAY_NOTHING.has(panel.type)) {
    const text = panel.fieldConfig?.defaults.noValue ?? 'No data';
    return <Said text={text} width={width} height={height} colour={around.theme.colors.text.secondary} />;
  }
  const {theme, range, settings, marks} = around;
  return kind({panel, data, width, height, theme, range, timeZone: settings.timeZone, marks});
}

function Said({text, width, height, colour}: {text: string; width: number; height: number; colour: string}): React.JSX.Element {
  return (
    <div style={{width, height, display: 'flex', alignItems: 'center', justifyContent: 'center', color: colour, padding: 16}}>
      {text}
    </div>
  );
}

/** What fails while it is drawn is an error of that panel only. */
class Boundary extends React.Component<{report: (message: string) => void; children: React.ReactNode}, {message?: string}> {
  override state: {message?: string} = {};

  static getDerivedStateFromError(error: Error): {message: string} {
    return {message: error.message};
  }

  override componentDidCatch(error: Error): void {
    this.props.report(`while drawn: ${error.message}`);
  }

  override render(): React.ReactNode {
    return this.state.message === undefined ? this.props.children : <div style={{color: 'red', padding: 16}}>{this.state.message}</div>;
  }
}

function outcome(panel: Panel, {chosen}: Surroundings, verdict: Verdict, message: string, data?: PanelData, count = 0): Outcome {
  return {
    id: panel.id, title: panel.title, type: panel.type, verdict, mayBeEmpty: mayBeEmpty(panel, chosen), message,
    series: data?.frames.length ?? 0, points: count, exemplars: data?.exemplars.length ?? 0,
  };
}
