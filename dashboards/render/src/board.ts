// The classic dashboard JSON, as far as these boards use it, and what a page is asked to draw.

export interface DataSource {
  type: string;
  uid: string;
}

export interface Target {
  refId: string;
  datasource: DataSource;
  // Prometheus
  expr?: string;
  interval?: string;
  instant?: boolean;
  exemplar?: boolean;
  format?: string;
  legendFormat?: string;
  // Jaeger: no `queryType` asks for one trace
  queryType?: string;
  query?: string;
  service?: string;
  operation?: string;
  tags?: string;
  minDuration?: string;
  limit?: number;
}

export interface Place {
  x: number;
  y: number;
  w: number;
  h: number;
}

export interface Panel {
  id: number;
  type: string;
  title: string;
  description?: string;
  gridPos: Place;
  interval?: string;
  targets?: Target[];
  // Options and field settings are passed on to the component library, which knows their types.
  options?: any;
  fieldConfig?: {defaults: any; overrides: any[]};
  transformations?: Array<{id: string; options: any}>;
}

export interface Variable {
  name: string;
  type: string;
  label?: string;
  query: string | {query: string};
  current?: {value: string | string[]; text: string | string[]} | null;
  multi?: boolean;
  includeAll?: boolean;
  allValue?: string | null;
}

export interface AnnotationQuery {
  name: string;
  enable: boolean;
  iconColor: string;
  target: {expr: string; interval?: string};
  titleFormat?: string;
}

export interface BoardLink {
  title: string;
  type: string;
  url?: string;
  tags?: string[];
}

export interface Board {
  uid: string;
  title: string;
  tags: string[];
  panels: Panel[];
  templating: {list: Variable[]};
  annotations: {list: AnnotationQuery[]};
  links: BoardLink[];
}

// What one page draws; the program that opens it serves this as /settings.json.
export interface Settings {
  board: Board;
  others: Array<{uid: string; title: string; tags: string[]}>;
  fromMs: number;
  toMs: number;
  theme: 'dark' | 'light';
  timeZone: string;
  widthPx: number;
  scrapeMs: number;
  variables: Record<string, string[]>;
}
