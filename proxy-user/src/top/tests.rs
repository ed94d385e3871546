use std::net::SocketAddr;

use insta::assert_snapshot;
use proxy_common::reason::Reason;
use proxy_common::stats::ServiceStats;
use proxy_core::model::FlowState;
use ratatui::backend::Backend as _;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::*;
use crate::cli::show::AgentState;
use crate::maps::view::{FlowRow, Forwarding, Transport};
use crate::rates::Counters;
use crate::rates::tests::{endpoint, service};
use proxy_cli::args::top::{Screen, SortBy};

const WEB: u32 = 3;
const DB: u32 = 4;

fn counters(seconds: u64) -> Counters {
    let mut counters = Counters { at: Duration::from_secs(seconds), ..Counters::default() };
    service(&mut counters, WEB, "web");
    service(&mut counters, DB, "a-database-with-quite-a-long-name");
    service(&mut counters, 5, "idle");
    // All counters increase from look to look.
    let times = seconds / 2;
    let stats = |connections, packets, bytes| ServiceStats {
        connections: connections * times,
        packets: packets * times,
        bytes: bytes * times,
        ..ServiceStats::default()
    };
    counters.snapshot.service_stats =
        [(WEB, stats(240, 9_000, 3_600_000)), (DB, stats(3, 20_000, 900))].into();
    endpoint(&mut counters, 1, WEB, 180 * times);
    endpoint(&mut counters, 2, WEB, 60 * times);
    endpoint(&mut counters, 6, WEB, 0);
    endpoint(&mut counters, 7, DB, 3 * times);
    counters.snapshot.ejected.insert(6, 12);
    counters.on_trial.insert(2);
    counters.snapshot.refusals = [((WEB, Reason::SourceNotAllowed), 6 * times)].into();
    counters.reasons =
        [(Reason::SourceNotAllowed, 8 * times), (Reason::OutOfWindow, 40 * times), (Reason::Malformed, 0)]
            .into();
    counters.flows.states = [(FlowState::Established, 2)].into();
    counters
}

fn sample(seconds: u64) -> Sample {
    let flow = |client: &str, state, idle| FlowRow {
        protocol: Transport(6),
        client: client.parse().unwrap(),
        frontend: "10.96.0.3:80".parse().unwrap(),
        backend: "10.244.0.1:8080".parse().unwrap(),
        source: client.parse().unwrap(),
        service: WEB,
        backend_id: 1,
        state,
        forwarding: Forwarding::Dnat,
        age: Duration::from_mins(1),
        idle: Duration::from_secs(idle),
        timeout: Duration::from_hours(1),
    };
    let address: SocketAddr = "127.0.0.1:10249".parse().unwrap();
    Sample {
        counters: Ok(counters(seconds)),
        agent: AgentState::Answered { address, status: 200 },
        flows: vec![
            flow("192.0.2.7:40001", FlowState::Established, 20),
            flow("192.0.2.8:40002", FlowState::Closing, 3),
            flow("192.0.2.9:40003", FlowState::Expired, 900),
        ],
        examples: vec![(
            "source_not_allowed",
            "12:00:00.000 drop   192.0.2.7:40001 (eth0) -> 10.96.0.3:80/TCP".into(),
        )],
    }
}

/// Returns the state after three looks, at intervals of two seconds.
fn sampled(screen: Screen) -> Top {
    let mut top = Top::new(screen, SortBy::Connections, "", Duration::from_secs(2));
    for seconds in [2, 4, 6] {
        top.take(sample(seconds));
    }
    top
}

fn press(top: &mut Top, keys: &str) {
    for key in keys.chars() {
        let code = match key {
            '\n' => KeyCode::Enter,
            '\u{1b}' => KeyCode::Esc,
            key => KeyCode::Char(key),
        };
        top.key(KeyEvent::new(code, KeyModifiers::NONE));
    }
}

fn drawn(top: &Top) -> String {
    let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
    terminal.draw(|frame| draw::draw(frame, top, true)).unwrap();
    lines(terminal.backend().buffer())
}

#[test]
fn services_fit_into_80_columns() {
    assert_snapshot!(drawn(&sampled(Screen::Services)));
}

#[test]
fn a_service_opens() {
    let mut top = sampled(Screen::Services);
    press(&mut top, "\n");
    assert_snapshot!(drawn(&top));
    press(&mut top, "\u{1b}");
    assert_eq!(top.opened, None);
}

#[test]
fn drops_with_examples() {
    let mut top = sampled(Screen::Drops);
    press(&mut top, "j");
    assert_snapshot!(drawn(&top));
}

#[test]
fn connections() {
    assert_snapshot!(drawn(&sampled(Screen::Flows)));
}

#[test]
fn help_is_drawn_above_the_screen() {
    let mut top = sampled(Screen::Services);
    press(&mut top, "?");
    assert_snapshot!(drawn(&top));
    press(&mut top, "q");
    assert!(!top.shows_help && !top.quits, "any key closes it, and does nothing else");
}

#[test]
fn a_filter_is_typed() {
    let mut top = sampled(Screen::Services);
    press(&mut top, "/WEBq");
    assert!(drawn(&top).contains("/WEBq_") && top.rows() == 0 && !top.quits);
    top.key(KeyEvent::new(KeyCode::Backspace, KeyModifiers::NONE));
    press(&mut top, "\n");
    let names: Vec<_> = top.services().iter().map(|row| &*row.service).collect();
    assert_eq!(names, ["default/web:http"]);
    press(&mut top, "\u{1b}");
    assert_eq!(top.rows(), 3);
}

#[test]
fn the_cursor_stays_with_its_service() {
    let mut top = sampled(Screen::Services);
    let order = |top: &Top| top.services().iter().map(|row| row.id).collect::<Vec<_>>();
    assert_eq!((order(&top), top.cursor), (vec![WEB, DB, 5], 0));
    press(&mut top, "s");
    top.take(sample(8));
    assert_eq!((order(&top), top.cursor), (vec![DB, WEB, 5], 0), "no line was selected");
    press(&mut top, "j");
    press(&mut top, "ssss");
    top.take(sample(10));
    assert_eq!((order(&top), top.cursor), (vec![WEB, DB, 5], 0), "it went with it");
}

#[test]
fn while_it_is_paused_nothing_moves() {
    let mut top = sampled(Screen::Services);
    press(&mut top, " ");
    let before = drawn(&top);
    assert!(before.contains("PAUSED"));
    assert!(!top.take(sample(60)));
    assert_eq!(drawn(&top), before);
    press(&mut top, " ");
    assert!(top.take(sample(62)) && !drawn(&top).contains("PAUSED"));
    assert_eq!(top.rates.services.len(), 3);
    assert!(
        (top.rates.total.connections - 121.5).abs() < 1e-9,
        "the rate is that of the last interval: {:?}",
        top.rates.total
    );
}

#[test]
fn absent_agent_and_absent_maps_are_shown() {
    let mut top = sampled(Screen::Services);
    let address = "127.0.0.1:10249".parse().unwrap();
    top.take(Sample { agent: AgentState::Silent { address, reason: "refused".into() }, ..sample(8) });
    assert!(drawn(&top).contains("agent: no answer; the maps are still read"));
    top.take(Sample { counters: Err("no Ballast on the bpffs /x".into()), ..sample(10) });
    let text = drawn(&top);
    assert!(text.contains("no Ballast on the bpffs /x") && text.contains("default/web:http"), "{text}");
}

#[test]
fn without_colour_no_cell_has_one() {
    use ratatui::style::Color;
    let coloured = |colour: bool| {
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).unwrap();
        terminal.draw(|frame| draw::draw(frame, &sampled(Screen::Services), colour)).unwrap();
        terminal
            .backend()
            .buffer()
            .content
            .iter()
            .any(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset)
    };
    assert!(coloured(true) && !coloured(false));
}

#[test]
fn every_size_of_a_terminal_is_drawn() {
    for (width, height) in [(1, 1), (20, 5), (80, 24), (300, 100)] {
        for screen in [Screen::Services, Screen::Drops, Screen::Flows] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            let mut top = sampled(screen);
            press(&mut top, "\nG?");
            terminal.draw(|frame| draw::draw(frame, &top, true)).unwrap();
            assert_eq!(terminal.backend().size().unwrap().width, width);
        }
    }
}
