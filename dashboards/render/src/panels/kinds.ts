// Which module draws which type of panel.

import {heatmap} from './heatmap';
import type {Kind} from './kind';
import {stateTimeline} from './stateTimeline';
import {table} from './table';
import {timeseries} from './timeseries';
import {traces} from './traces';
import {bargauge, stat} from './values';

export const KINDS: Readonly<Record<string, Kind>> = {
  bargauge,
  heatmap,
  stat,
  'state-timeline': stateTimeline,
  table,
  timeseries,
  traces,
};
