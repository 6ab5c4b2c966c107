// The board: its title, links, variables and time above, its panels on Grafana's grid of 24 columns.

import {dateTimeFormat} from '@grafana/data';
import {Icon} from '@grafana/ui';
import React from 'react';

import type {Board, Panel} from './board';
import {withDefaults} from './panels/defaults';
import {PanelView, type Surroundings} from './PanelView';
import {type Chosen, shown} from './variables';

const COLUMNS = 24;
const CELL_PX = 30;
const GAP_PX = 8;
const EDGE_PX = 16;

export function BoardView({board, around}: {board: Board; around: Surroundings}): React.JSX.Element {
  const {theme, settings} = around;
  const inner = settings.widthPx - 2 * EDGE_PX;
  const lines = Math.max(...board.panels.map(({gridPos}) => gridPos.y + gridPos.h));
  return (
    <div style={{width: settings.widthPx, padding: EDGE_PX, boxSizing: 'border-box', background: theme.colors.background.canvas, color: theme.colors.text.primary}}>
      <Heading board={board} around={around} />
      <Controls board={board} around={around} />
      <div style={{position: 'relative', height: lines * (CELL_PX + GAP_PX)}}>
        {board.panels.map((panel) => {
          const box = boxOf(panel, inner);
          return (
            <div key={panel.id} data-panel={panel.id} style={{position: 'absolute', left: box.left, top: box.top}}>
              {panel.type === 'row' ? (
                <div style={{height: box.height, display: 'flex', alignItems: 'center', gap: 4, fontWeight: 500}}>
                  <Icon name="angle-down" /> {panel.title}
                </div>
              ) : (
                <PanelView panel={withDefaults(panel)} width={box.width} height={box.height} around={around} />
              )}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function Heading({board, around}: {board: Board; around: Surroundings}): React.JSX.Element {
  const {theme, settings} = around;
  const time = (ms: number): string => dateTimeFormat(ms, {timeZone: settings.timeZone, format: 'YYYY-MM-DD HH:mm:ss'});
  return (
    <div style={{display: 'flex', alignItems: 'center', gap: 8, marginBottom: 12}}>
      <Icon name="apps" />
      <span style={{color: theme.colors.text.secondary}}>PD serving</span>
      <Icon name="angle-right" />
      <span style={{fontSize: 18, fontWeight: 500, flexGrow: 1}}>{board.title}</span>
      <span style={{...pill(around), padding: '5px 10px', display: 'flex', gap: 6, alignItems: 'center'}}>
        <Icon name="clock-nine" /> {time(settings.fromMs)} to {time(settings.toMs)} {settings.timeZone.toUpperCase()}
      </span>
    </div>
  );
}

function Controls({board, around}: {board: Board; around: Surroundings}): React.JSX.Element {
  const {theme, chosen, settings} = around;
  const links = board.links.flatMap((link) =>
    link.type === 'dashboards'
      ? settings.others.filter((other) => link.tags?.every((tag) => other.tags.includes(tag))).map((other) => other.title)
      : [link.title],
  );
  return (
    <div style={{display: 'flex', flexWrap: 'wrap', alignItems: 'center', gap: 8, marginBottom: 12, fontSize: 12}}>
      {[...chosen.values()].map((one) => (
        <span key={one.variable.name} style={{display: 'flex', alignItems: 'stretch'}}>
          <span style={{...pill(around), borderRight: 'none', padding: '6px 8px', fontWeight: 500, color: theme.colors.text.primary}}>
            {one.variable.label ?? one.variable.name}
          </span>
          <span style={{...pill(around), padding: '6px 10px', background: theme.components.input.background, minWidth: 60}}>{told(one)}</span>
        </span>
      ))}
      <div style={{flexGrow: 1, display: 'flex', flexWrap: 'wrap', justifyContent: 'flex-end', gap: 8}}>
        {links.map((title) => (
          <span key={title} style={{...pill(around), padding: '6px 10px', display: 'flex', gap: 4, alignItems: 'center'}}>
            <Icon name="apps" size="sm" /> {title}
          </span>
        ))}
      </div>
    </div>
  );
}

function told(one: Chosen): string {
  const text = shown(one);
  return one.variable.type === 'textbox' && text.length > 40 ? `${text.slice(0, 40)}…` : text;
}

function pill({theme}: Surroundings): React.CSSProperties {
  return {
    background: theme.colors.background.secondary,
    border: `1px solid ${theme.colors.border.medium}`,
    borderRadius: theme.shape.radius.default,
    color: theme.colors.text.secondary,
  };
}

function boxOf({gridPos}: Panel, inner: number): {left: number; top: number; width: number; height: number} {
  const column = (inner - (COLUMNS - 1) * GAP_PX) / COLUMNS;
  return {
    left: gridPos.x * (column + GAP_PX),
    top: gridPos.y * (CELL_PX + GAP_PX),
    width: gridPos.w * column + (gridPos.w - 1) * GAP_PX,
    height: gridPos.h * CELL_PX + (gridPos.h - 1) * GAP_PX,
  };
}
