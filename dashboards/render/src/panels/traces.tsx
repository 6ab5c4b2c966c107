// One trace as a waterfall. The library has no such panel; laid out as Grafana's, with a colour for
// each service and, of each span, the worker, the time it took and what it waited for.

import {dateTimeFormat, formattedValueToString, getValueFormat, type GrafanaTheme2} from '@grafana/data';
import React from 'react';

import {type JaegerTrace, type Line, ticks, waterfall} from '../spans';
import type {Kind} from './kind';

const NAMES_PX = 400;
const LINE_PX = 24;
const RIGHT_PX = 76;
const GAP_PX = 5;
const BARS = ['#7EB26D', '#EAB839', '#6ED0E0', '#EF843C', '#E24D42', '#1F78C1', '#BA43A9', '#705DA0'];

export const traces: Kind = ({data, width, height, theme, timeZone}) => {
  const trace: JaegerTrace = data.frames[0].fields[0].values[0];
  const fall = waterfall(trace);
  const services = [...new Set(fall.lines.map((line) => line.service))];
  const colour = (service: string): string => BARS[services.indexOf(service) % BARS.length];
  const barsPx = width - NAMES_PX - RIGHT_PX;
  const x = (us: number): number => NAMES_PX + (us / fall.durationUs) * barsPx;
  const fits = Math.max(1, Math.floor((height - 96) / LINE_PX));
  const left = fall.lines.length - fits;
  const root = fall.lines[0];
  const text = theme.colors.text;
  return (
    <div style={{height, overflow: 'hidden', color: text.primary, fontSize: 12}}>
      <div style={{fontSize: 18, padding: '2px 8px'}}>
        {root.service}: {root.name} <span style={{color: text.secondary, fontSize: 12}}>{trace.traceID}</span>
      </div>
      <div style={{display: 'flex', gap: 20, padding: '4px 8px 8px', color: text.secondary}}>
        <span>{dateTimeFormat(fall.startUs / 1000, {timeZone, format: 'YYYY-MM-DD HH:mm:ss.SSS'})}</span>
        <span>{micros(fall.durationUs)}</span>
        <span>{fall.lines.length} spans</span>
        <Verdict root={root} theme={theme} />
        {services.map((service) => (
          <span key={service}>
            <span style={{display: 'inline-block', width: 10, height: 10, marginRight: 5, background: colour(service)}} />
            {service}
          </span>
        ))}
      </div>
      <svg width={width} height={height - 62} style={{fontFamily: theme.typography.fontFamily}}>
        {ticks(fall.durationUs, 8).map((us) => (
          <g key={us}>
            <line x1={x(us)} x2={x(us)} y1={20} y2={height} stroke={theme.colors.border.weak} />
            <text x={x(us) + 3} y={13} fill={text.secondary} fontSize={11}>{micros(us)}</text>
          </g>
        ))}
        {fall.lines.slice(0, fits).map((line, index) => (
          <g key={line.id} transform={`translate(0,${24 + index * LINE_PX})`}>
            {index % 2 === 1 && <rect width={width} height={LINE_PX} fill={theme.colors.action.hover} opacity={0.5} />}
            <rect x={8 + line.depth * 14} y={5} width={3} height={14} fill={colour(line.service)} />
            <text x={16 + line.depth * 14} y={16} fontSize={12}>
              <tspan fill={text.primary}>{line.name}</tspan>
              <tspan fill={text.secondary} dx={8}>{line.instance || line.service}</tspan>
              {line.failed && <tspan fill={theme.colors.error.text} dx={8}>error</tspan>}
            </text>
            <rect x={x(line.startUs)} y={6} width={Math.max((line.durationUs / fall.durationUs) * barsPx, 1.5)} height={12} rx={1.5} fill={colour(line.service)} />
            <Beside line={line} x={x} right={width} theme={theme} />
          </g>
        ))}
        {left > 0 && <text x={8} y={height - 70} fontSize={12} fill={text.secondary}>… and {left} spans more</text>}
      </svg>
    </div>
  );
};

/** The time it took: right of the bar, left of it, or in it, where there is room. */
function Beside({line, x, right, theme}: {line: Line; x: (us: number) => number; right: number; theme: GrafanaTheme2}): React.JSX.Element {
  const reason = line.tags.get('pd.wait.reason');
  const said = reason === undefined ? micros(line.durationUs) : `${micros(line.durationUs)} · ${String(reason)}`;
  const needed = said.length * 6.5;
  const [start, end] = [x(line.startUs) - GAP_PX, x(line.startUs + line.durationUs) + GAP_PX];
  const text = theme.colors.text;
  const [at, anchor, fill] = right - end > needed
    ? [end, 'start', text.secondary]
    : start - NAMES_PX > needed ? [start, 'end', text.secondary] : [end - 2 * GAP_PX, 'end', '#000'];
  return (
    <text x={at} y={16} fontSize={11} textAnchor={anchor as 'start' | 'end'} fill={fill}>
      {said}
    </text>
  );
}

function Verdict({root, theme}: {root: Line; theme: GrafanaTheme2}): React.JSX.Element | null {
  const stage = root.tags.get('pd.stall.stage');
  if (stage === undefined) {
    return null;
  }
  const seconds = Number(root.tags.get('pd.stall.duration'));
  const took = Number.isFinite(seconds) ? `, ${micros(seconds * 1e6)}` : '';
  return <span style={{color: theme.colors.warning.text}}>stalled in {String(stage)}{took}</span>;
}

function micros(us: number): string {
  const decimals = us === 0 || us >= 1e8 ? 0 : undefined;
  return formattedValueToString(getValueFormat('µs')(us, decimals));
}
