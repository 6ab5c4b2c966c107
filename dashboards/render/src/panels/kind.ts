// What every kind of panel is given to draw.

import type {GrafanaTheme2, TimeRange} from '@grafana/data';
import type {ReactElement} from 'react';

import type {Panel} from '../board';
import type {PanelData} from '../data/loading';
import type {Mark} from '../marks';

export interface Drawing {
  panel: Panel;
  data: PanelData;
  width: number;
  height: number;
  theme: GrafanaTheme2;
  range: TimeRange;
  timeZone: string;
  marks: Mark[];
}

export type Kind = (drawing: Drawing) => ReactElement;
