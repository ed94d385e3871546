//! Draws the screens, for terminals of at least 80 columns and 24 lines.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Clear, Paragraph, Row, Table, TableState, Wrap};

use super::state::Top;
use super::text::{bars, rate};
use crate::cli::show::AgentState;
use crate::rates::{EndpointRates, Point, ServiceRates, Traffic};
use proxy_cli::args::top::{Screen, SortBy};
use proxy_cli::output::age;

/// Width of a curve, in columns.
const CURVE: u16 = 12;
/// Lines below the reasons: the explanation of the selected reason, and its examples.
const EXAMPLES: u16 = 11;

/// Styles; without colours if they are not wanted. Bold and reversed are not colours.
#[derive(Clone, Copy)]
struct Paint(bool);

impl Paint {
    fn colour(self, colour: Color) -> Style {
        if self.0 { Style::new().fg(colour) } else { Style::new() }
    }

    fn alarm(self, value: f64) -> Style {
        if value > 0.0 { self.colour(Color::Red) } else { Style::new() }
    }
}

/// Draws a frame.
pub(super) fn draw(frame: &mut Frame<'_>, top: &Top, colour: bool) {
    let paint = Paint(colour);
    let [head, totals, tabs, body, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Length(if top.failure.is_some() { 4 } else { 2 }),
        Constraint::Min(3),
        Constraint::Length(u16::from(!top.is_printed)),
    ])
    .areas(frame.area());
    frame.render_widget(headline(top, paint), head);
    frame.render_widget(total(top, totals.width, paint), totals);
    let failure = Line::styled(top.failure.clone().unwrap_or_default(), paint.colour(Color::Red));
    let lines = vec![selection(top, paint), failure];
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: false }), tabs);
    match (top.screen, top.opened.and_then(|id| top.service(id))) {
        (Screen::Services, Some(service)) => endpoints(frame, body, top, service, paint),
        (Screen::Services, None) => services(frame, body, top, paint),
        (Screen::Drops, _) => drops(frame, body, top, paint),
        (Screen::Flows, _) => flows(frame, body, top),
    }
    frame.render_widget(Line::from(keys_of(top)).style(paint.colour(Color::DarkGray)), keys);
    if top.shows_help {
        help(frame);
    }
}

fn headline(top: &Top, paint: Paint) -> Line<'static> {
    let agent = match &top.agent {
        None => Span::raw("agent: not checked yet"),
        Some(AgentState::NotAsked) => Span::raw("agent: not checked (no metrics server)"),
        Some(AgentState::Answered { status: 200, .. }) => {
            Span::styled("agent: ok", paint.colour(Color::Green))
        }
        Some(AgentState::Answered { .. }) => {
            Span::styled("agent: unhealthy, see `ballast status`", paint.colour(Color::Red))
        }
        Some(AgentState::Silent { .. }) => {
            Span::styled("agent: no answer; the maps are still read", paint.colour(Color::Yellow))
        }
    };
    let mut spans = vec![Span::raw("ballast top  ").style(Modifier::BOLD), agent];
    if top.is_paused {
        spans.push(Span::styled("  PAUSED", Style::new().add_modifier(Modifier::REVERSED)));
    }
    Line::from(spans)
}

fn total(top: &Top, width: u16, paint: Paint) -> Line<'static> {
    let Traffic { connections, packets, bytes, failures } = top.rates.total;
    let text =
        format!("conn/s {:<6} pkt/s {:<6} bytes/s {:<6} ", rate(connections), rate(packets), rate(bytes));
    let refused = format!("fail/s {:<6} ", rate(failures));
    let flows = format!("flows {:<8}", top.rates.flows);
    let used = [&text, &refused, &flows].iter().map(|part| part.chars().count()).sum();
    let curve =
        bars(top.history.total().map(|point| point.connections), usize::from(width).saturating_sub(used));
    Line::from(vec![
        Span::raw(text),
        Span::styled(refused, paint.alarm(failures)),
        Span::raw(flows),
        Span::styled(curve, paint.colour(Color::Cyan)),
    ])
}

fn selection(top: &Top, paint: Paint) -> Line<'static> {
    let mut spans = Vec::new();
    for (screen, name) in
        [(Screen::Services, " 1 Services "), (Screen::Drops, " 2 Drops "), (Screen::Flows, " 3 Flows ")]
    {
        let style = if top.screen == screen { Modifier::REVERSED } else { Modifier::empty() };
        spans.push(Span::styled(name, style));
    }
    if top.screen == Screen::Services {
        let by = match top.sort {
            SortBy::Connections => "conn/s",
            SortBy::Packets => "pkt/s",
            SortBy::Bytes => "bytes/s",
            SortBy::Failures => "fail/s",
            SortBy::Name => "name",
        };
        spans.push(Span::raw(format!("   by {by}")));
    }
    spans.push(Span::raw(format!("   every {:?}", top.interval)));
    if top.is_typing || !top.filter.is_empty() {
        let end = if top.is_typing { "_" } else { "" };
        spans.push(Span::styled(format!("   /{}{end}", top.filter), paint.colour(Color::Yellow)));
    }
    Line::from(spans)
}

fn keys_of(top: &Top) -> &'static str {
    match (top.screen, top.opened, top.is_typing) {
        (_, _, true) => "enter apply filter   esc clear filter",
        (Screen::Services, None, _) => {
            "q quit  ? help  1-3 screens  enter endpoints  / filter  s sort  space pause"
        }
        (Screen::Services, Some(_), _) => "q quit  ? help  esc back to Services  space pause",
        _ => "q quit  ? help  1-3 screens  / filter  space pause",
    }
}

fn header<const N: usize>(titles: [&'static str; N], right: &[usize]) -> Row<'static> {
    let cells = titles.into_iter().enumerate().map(|(at, title)| {
        let line = Line::from(title);
        Cell::from(if right.contains(&at) { line.right_aligned() } else { line })
    });
    Row::new(cells).style(Modifier::BOLD)
}

fn number(text: String) -> Cell<'static> {
    Cell::from(Line::from(text).right_aligned())
}

/// Draws a table in which the row of the cursor is visible and marked.
fn table<const N: usize>(
    frame: &mut Frame<'_>,
    area: Rect,
    top: &Top,
    rows: Vec<Row<'_>>,
    (header, widths): (Row<'_>, [Constraint; N]),
) {
    let mut state = TableState::new().with_selected((!top.is_printed).then_some(top.cursor));
    let table = Table::new(rows, widths).header(header).row_highlight_style(Modifier::REVERSED);
    frame.render_stateful_widget(table, area, &mut state);
}

fn services(frame: &mut Frame<'_>, area: Rect, top: &Top, paint: Paint) {
    let shown = top.services();
    if shown.is_empty() {
        let text =
            if top.filter.is_empty() { "no Service is programmed" } else { "no Service matches the filter" };
        frame.render_widget(text, area);
        return;
    }
    let row = |service: &&ServiceRates| {
        let rates = service.rates;
        let serving =
            service.endpoints.iter().filter(|row| row.state == "active" && row.ejected_seconds.is_none());
        let endpoints = format!("{}/{}", serving.count(), service.endpoints.len());
        let curve = bars(top.history.of(service.id).map(curve_of(top.sort)), CURVE.into());
        Row::new([
            Cell::from(service.service.clone()),
            Cell::from(format!("{}{}", service.protocol, service.family.trim_start_matches("IPv"))),
            number(rate(rates.connections)),
            number(rate(rates.packets)),
            number(rate(rates.bytes)),
            number(rate(rates.failures)).style(paint.alarm(rates.failures)),
            number(endpoints),
            Cell::from(curve).style(paint.colour(Color::Cyan)),
        ])
    };
    let titles = ["SERVICE", "PROTO", "CONN/S", "PKT/S", "BYTES/S", "FAIL/S", "ENDPTS", ""];
    let widths = [
        Constraint::Min(22),
        Constraint::Length(5),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(7),
        Constraint::Length(6),
        Constraint::Length(7),
        Constraint::Length(CURVE),
    ];
    let rows = shown.iter().map(row).collect();
    table(frame, area, top, rows, (header(titles, &[2, 3, 4, 5, 6]), widths));
}

/// Returns the value that the curve of a Service shows: the value by which Services are sorted.
fn curve_of(sort: SortBy) -> fn(Point) -> f32 {
    match sort {
        SortBy::Connections | SortBy::Name => |point| point.connections,
        SortBy::Packets => |point| point.packets,
        SortBy::Bytes => |point| point.bytes,
        SortBy::Failures => |point| point.failures,
    }
}

fn endpoints(frame: &mut Frame<'_>, area: Rect, top: &Top, service: &ServiceRates, paint: Paint) {
    let [about, list] = Layout::vertical([Constraint::Length(4), Constraint::Min(2)]).areas(area);
    let destination: Vec<_> = service.frontends.iter().map(ToString::to_string).collect();
    let refused: Vec<_> =
        service.failures.iter().map(|(reason, value)| format!("{reason} {}/s", rate(*value))).collect();
    let refused = if refused.is_empty() { "none".to_owned() } else { refused.join(", ") };
    let spread = format!("{}, {}", service.algorithm, destination.join(" "));
    let lines = vec![
        Line::from(format!("{} {} {}", service.service, service.protocol, service.family))
            .style(Modifier::BOLD),
        Line::from(spread),
        Line::from(format!("refused or dropped: {refused}")).style(paint.alarm(service.rates.failures)),
    ];
    frame.render_widget(Paragraph::new(lines), about);
    if service.endpoints.is_empty() {
        frame.render_widget("no endpoint: connections are refused, or dropped if a policy is Local", list);
        return;
    }
    let titles = ["ENDPOINT", "STATE", "LOCAL", "WEIGHT", "CONN/S", "SHARE", "OPEN", "TOTAL"];
    let widths = [
        Constraint::Min(20),
        Constraint::Length(11),
        Constraint::Length(5),
        Constraint::Length(6),
        Constraint::Length(6),
        Constraint::Length(5),
        Constraint::Length(5),
        Constraint::Length(8),
    ];
    let row = |row: &EndpointRates| {
        let (state, style) = match (row.ejected_seconds, row.on_trial) {
            (Some(left), _) => (format!("ejected {left}s"), paint.colour(Color::Red)),
            (None, true) => ("on trial".to_owned(), paint.colour(Color::Yellow)),
            (None, false) => (row.state.to_owned(), Style::new()),
        };
        Row::new([
            Cell::from(row.address.to_string()),
            Cell::from(state).style(style),
            Cell::from(if row.local { "yes" } else { "no" }),
            number(row.weight.to_string()),
            number(rate(row.connections)),
            number(row.share.map_or_else(|| "-".to_owned(), |share| format!("{:.0}%", share * 100.0))),
            number(row.open.map_or_else(|| "-".to_owned(), |open| open.to_string())),
            number(row.total.to_string()),
        ])
    };
    let rows = service.endpoints.iter().map(row).collect();
    table(frame, list, top, rows, (header(titles, &[3, 4, 5, 6, 7]), widths));
}

/// Returns the number of lines below the list; only the screen of drops has some.
pub(super) fn below(top: &Top) -> u16 {
    let is_empty = top.is_printed && top.examples.is_empty();
    if top.screen == Screen::Drops && !is_empty { EXAMPLES } else { 0 }
}

fn drops(frame: &mut Frame<'_>, area: Rect, top: &Top, paint: Paint) {
    let [list, about] = Layout::vertical([Constraint::Min(3), Constraint::Length(below(top))]).areas(area);
    let shown = top.reasons();
    if shown.is_empty() {
        frame.render_widget("nothing was refused or dropped since the maps were created", list);
        return;
    }
    let rows = shown.iter().map(|row| {
        let style = if row.verdict == "pass" { Style::new() } else { paint.alarm(row.rate) };
        Row::new([
            Cell::from(row.reason),
            Cell::from(row.verdict),
            number(rate(row.rate)).style(style),
            number(row.total.to_string()),
        ])
    });
    let titles = ["REASON", "VERDICT", "PER SECOND", "TOTAL"];
    let widths = [Constraint::Min(24), Constraint::Length(8), Constraint::Length(10), Constraint::Length(14)];
    table(frame, list, top, rows.collect(), (header(titles, &[2, 3]), widths));
    let Some(row) = shown.get(top.cursor) else { return };
    let mut lines = vec![Line::default()];
    lines.push(Line::from(format!("{}: {}", row.reason, row.explanation)).style(Modifier::BOLD));
    lines.push(Line::from(row.advice));
    match top.examples.get(row.reason) {
        Some(examples) => lines.extend(examples.iter().map(|example| Line::from(example.clone()))),
        None => lines.push(Line::from("no example since this screen was opened")),
    }
    frame.render_widget(Paragraph::new(lines).wrap(Wrap { trim: true }), about);
}

fn flows(frame: &mut Frame<'_>, area: Rect, top: &Top) {
    let shown = top.shown_flows();
    if shown.is_empty() {
        frame.render_widget("no connection in the packet path", area);
        return;
    }
    let rows = shown.iter().map(|flow| {
        let service = top.names.get(&flow.service).cloned();
        Row::new([
            Cell::from(flow.protocol.to_string()),
            Cell::from(flow.client.to_string()),
            Cell::from(service.unwrap_or_else(|| flow.frontend.to_string())),
            Cell::from(flow.backend.to_string()),
            Cell::from(flow.state.label()),
            number(age(flow.idle)),
        ])
    });
    let titles = ["PROTO", "CLIENT", "SERVICE", "ENDPOINT", "STATE", "IDLE"];
    let widths = [
        Constraint::Length(5),
        Constraint::Min(18),
        Constraint::Min(16),
        Constraint::Min(16),
        Constraint::Length(11),
        Constraint::Length(5),
    ];
    table(frame, area, top, rows.collect(), (header(titles, &[5]), widths));
}

fn help(frame: &mut Frame<'_>) {
    let lines: Vec<Line<'_>> = [
        "1 2 3, tab      Services, drops, flows",
        "up down j k     one row; page up, page down: ten rows; home, end",
        "enter, right    endpoints of the selected Service",
        "esc, left       back to Services; clear the filter",
        "/               show only lines that contain a text",
        "s               sort by the next column, also in the graph",
        "space, p        pause",
        "q, Ctrl-C       quit",
        "",
        "conn/s: new connections of sockets and packets. pkt/s, bytes/s:",
        "only the packet path, without traffic of translated sockets.",
        "PROTO: protocol and IP version. A Service has a line for each family.",
        "ENDPTS: endpoints that take new connections / all endpoints.",
        "Press any key to close this help.",
    ]
    .into_iter()
    .map(Line::from)
    .collect();
    let area = frame.area().centered(Constraint::Length(74), Constraint::Length(lines.len() as u16 + 2));
    frame.render_widget(Clear, area);
    let block = ratatui::widgets::Block::bordered().title(" help ");
    frame.render_widget(Paragraph::new(lines).block(block), area);
}
