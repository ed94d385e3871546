//! `ballast top`: Services, endpoints, drops and connections, as they happen.
//!
//! One thread reads the maps ([`sampler`]), another one draws ([`draw`]) the [`state`], so that a key takes effect at once. The
//! maps are pinned, so all screens work while the agent does not run; the first line then says so.

mod draw;
mod sampler;
mod state;
mod text;

use std::io::{self, IsTerminal as _};
use std::sync::mpsc::{self, TryRecvError};
use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use sampler::{Sample, Sampler};
use state::Top;

use crate::cli::colour;
use crate::cli::selector::SelectInMaps as _;
use crate::cli::show::{self, FlowSelection, ShowError};
use crate::maps::view::{View, ViewError};
use crate::rates::{Counters, Rates, ReasonRate};
use proxy_cli::args::list::Output;
use proxy_cli::args::top::{Screen, SortBy, TopArgs};
use proxy_cli::output::{Column, List, ListError, Row};
use proxy_cli::selector::{AskLabels, ServiceSelector};

/// How long the loop waits for a key before it checks for a new look.
const KEYS: Duration = Duration::from_millis(50);
/// Width of a printed frame if that of the terminal is unknown or smaller.
const WIDTH: u16 = 80;
/// Lines of a frame besides its rows.
const FRAME: u16 = 8;

/// Why `ballast top` failed.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// The maps cannot be read.
    #[error(transparent)]
    View(#[from] ViewError),
    /// The arguments select no Service, or the output cannot be written.
    #[error(transparent)]
    Show(#[from] ShowError),
    /// The list cannot be sorted or written.
    #[error(transparent)]
    List(#[from] ListError),
    /// The maps could be read once, and not again.
    #[error("cannot read the maps any more: {0}")]
    Gone(String),
    /// Standard output is not a terminal.
    #[error("standard output is not a terminal; use --once to print text")]
    NoTerminal,
    /// The terminal cannot be used.
    #[error("cannot use the terminal: {0}")]
    Terminal(#[from] io::Error),
    /// The thread that reads the maps has ended.
    #[error("the thread that reads the maps has ended")]
    Ended,
}

/// Runs until a key ends it; with `--once` or another format than text, returns the text of one frame.
pub fn run(args: &TopArgs, labels: AskLabels) -> Result<String, TopError> {
    let view = View::open(&args.maps.bpffs)?;
    let selector = ServiceSelector::programmed(&args.selector, &view, labels)?;
    let output = args.format.output;
    let colour = colour::of_stdout();
    let mut top = Top::new(args.screen, args.sort, &args.filter, args.interval);
    if output != Output::Text {
        return listed(args, &view, selector, output);
    }
    top.services = selector;
    if args.once {
        return once(&mut top, Sampler::new(view, args));
    }
    if !io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    let (sender, samples) = mpsc::sync_channel(1);
    let wanted = Sampler::new(view, args).start(sender);
    wanted.show(top.screen);
    let mut terminal = ratatui::try_init()?;
    let result = interact(&mut terminal, &mut top, &samples, |top| wanted.show(top.screen), colour);
    ratatui::try_restore()?;
    result.map(|()| String::new())
}

/// Returns the rows of the screen as a list.
fn listed(
    args: &TopArgs,
    view: &View,
    selector: ServiceSelector,
    output: Output,
) -> Result<String, TopError> {
    let takes = |text: &str| text.to_lowercase().contains(&args.filter.to_lowercase());
    Ok(match args.screen {
        Screen::Services => {
            let read = || Ok(view.snapshot()?);
            let mut list = show::Meter::default().rates(&selector, args.interval, read)?;
            let field = match args.sort {
                SortBy::Connections => "connections",
                SortBy::Packets => "packets",
                SortBy::Bytes => "bytes",
                SortBy::Failures => "refused",
                SortBy::Name => "service",
            };
            list.retain(|row| row.cells.iter().any(|cell| takes(cell)));
            list.sort_by(field)?;
            if args.sort != SortBy::Name {
                list.reverse();
            }
            list.render(output, true)?
        }
        Screen::Flows => {
            let selection = FlowSelection { services: selector, ..FlowSelection::default() };
            let mut list = show::flow_list(&view.flows()?, &view.service_names()?, &selection);
            list.retain(|row| row.cells.iter().any(|cell| takes(cell)));
            list.render(output, true)?
        }
        Screen::Drops => {
            let before = Counters::read_totals(view)?;
            std::thread::sleep(args.interval);
            let rates = Rates::of_totals(Some(&before), &Counters::read_totals(view)?);
            let mut list = reasons(rates.reasons);
            list.retain(|row| row.cells.iter().any(|cell| takes(cell)));
            list.sort_by("rate")?;
            list.reverse();
            list.render(output, true)?
        }
    })
}

/// Returns one row for each reason.
fn reasons(rates: Vec<ReasonRate>) -> List<ReasonRate> {
    let columns = [
        Column::new("REASON"),
        Column::new("VERDICT"),
        Column::new("PER SECOND").number().sorted_by("rate"),
        Column::new("TOTAL").number().sorted_by("total"),
        Column::new("EXPLANATION").wide(),
    ];
    let mut list = List::new("reasons", columns, "Nothing was refused or dropped.");
    for one in rates {
        let cells = vec![
            one.reason.to_owned(),
            one.verdict.to_owned(),
            format!("{:.1}", one.rate),
            one.total.to_string(),
            one.explanation.trim().to_owned(),
        ];
        let name = one.reason.to_owned();
        list.push(Row { group: "reasons", key: name.clone(), name, cells, value: one });
    }
    list
}

fn once(top: &mut Top, mut sampler: Sampler) -> Result<String, TopError> {
    for sample in [sampler.first(top.screen), sampler.next(top.screen)] {
        if let Err(error) = &sample.counters {
            return Err(TopError::Gone(error.clone()));
        }
        top.take(sample);
    }
    let width = ratatui::crossterm::terminal::size().map_or(WIDTH, |(width, _)| width).max(WIDTH);
    top.is_printed = true;
    let height = u16::try_from(top.rows().max(1)).unwrap_or(u16::MAX - FRAME);
    let height = height.saturating_add(FRAME).saturating_add(draw::below(top));
    // The backend is a buffer in memory, so these calls cannot fail.
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(frame) = terminal.draw(|frame| draw::draw(frame, top, false));
    Ok(lines(frame.buffer))
}

/// Returns the text of a buffer, without trailing blanks and without empty lines at the end.
fn lines(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width.max(1));
    let rows = buffer
        .content
        .chunks(width)
        .map(|row| row.iter().map(ratatui::buffer::Cell::symbol).collect::<String>());
    let mut text: String = rows.flat_map(|row| [row.trim_end().to_owned(), "\n".to_owned()]).collect();
    text.truncate(text.trim_end().len());
    text.push('\n');
    text
}

fn interact(
    terminal: &mut ratatui::DefaultTerminal,
    top: &mut Top,
    samples: &mpsc::Receiver<Sample>,
    show: impl Fn(&Top),
    colour: bool,
) -> Result<(), TopError> {
    let mut is_new = true;
    while !top.quits {
        if is_new {
            terminal.draw(|frame| draw::draw(frame, top, colour))?;
        }
        is_new = match samples.try_recv() {
            Ok(sample) => top.take(sample),
            Err(TryRecvError::Empty) => false,
            Err(TryRecvError::Disconnected) => return Err(TopError::Ended),
        };
        let until = Instant::now() + KEYS;
        while event::poll(until.saturating_duration_since(Instant::now()))? {
            match event::read()? {
                Event::Key(key) if key.kind == KeyEventKind::Press => top.key(key),
                Event::Resize(..) => {}
                _ => continue,
            }
            is_new = true;
            show(top);
            if top.quits {
                break;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
