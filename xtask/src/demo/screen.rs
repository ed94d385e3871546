//! What the demo writes: plain text for 80 to 100 columns, with colours on a terminal.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _, stdout};

use super::traffic::Tally;

const BOLD: &str = "1";
const DIM: &str = "2";
const GREEN: &str = "32";
const CYAN: &str = "36";
/// The longest bar.
const BAR: u64 = 40;
/// Asks for colours where standard output is no terminal.
pub(super) const COLOURED: &str = "CLICOLOR_FORCE";
/// Wider lines of other programs are cut here.
const WIDTH: usize = 100;

/// Writes one line to standard output.
pub(super) fn put(text: &str) {
    // A closed standard output is no reason to stop: the demo still takes its cluster down.
    let mut out = stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// The terminal, or what stands for it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Screen {
    is_coloured: bool,
    width: usize,
}

impl Screen {
    /// Colours only for people who did not ask for none.
    pub(super) fn new() -> Self {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_wanted = is_set(COLOURED) || stdout().is_terminal();
        Self { is_coloured: is_wanted && !is_set("NO_COLOR"), width: WIDTH }
    }

    fn paint(self, colour: &str, text: impl Display) -> String {
        if self.is_coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_string() }
    }

    /// The head of a step, and in one sentence what it shows.
    pub(super) fn step(self, number: u8, title: &str, sentence: &str) {
        self.title(&format!("{number}. {title}"));
        put(&format!("   {sentence}"));
    }

    /// A line that stands out.
    pub(super) fn title(self, text: &str) {
        put("");
        put(&self.paint(BOLD, text));
    }

    /// A command as it can be typed.
    pub(super) fn command(self, line: &str) {
        put("");
        put(&format!("   {} {}", self.paint(DIM, "$"), self.paint(CYAN, line)));
    }

    /// Text of a program, or a picture; long lines go on in the next.
    pub(super) fn text(self, text: &str) {
        for line in text.lines() {
            let letters: Vec<_> = line.chars().collect();
            for (number, part) in letters.chunks(self.width - 6).enumerate() {
                let indent = if number == 0 { "   " } else { "      " };
                put(format!("{indent}{}", part.iter().collect::<String>()).trim_end());
            }
            if line.is_empty() {
                put("");
            }
        }
    }

    /// The first lines of a long text.
    pub(super) fn head(self, text: &str, lines: usize) {
        let all: Vec<_> = text.lines().collect();
        self.text(&all.iter().take(lines).copied().collect::<Vec<_>>().join("\n"));
        if let Some(more) = all.len().checked_sub(lines).filter(|more| *more > 0) {
            self.text(&self.paint(DIM, format_args!("... {more} more lines")));
        }
    }

    /// Something that has been seen to be so.
    pub(super) fn seen(self, fact: &str) {
        put(&format!("   {} {fact}", self.paint(GREEN, "ok:")));
    }

    /// A bar for each pod, also for one that was not met.
    pub(super) fn bars(self, tally: &Tally, pods: &[&str]) {
        let most = pods.iter().map(|pod| tally.of(pod)).max().unwrap_or_default().max(1);
        for pod in pods {
            let count = tally.of(pod);
            let bar = "#".repeat(usize::try_from(count * BAR / most).unwrap_or_default());
            self.text(&format!("{pod}  {count:>5}  {}", self.paint(GREEN, bar)));
        }
    }
}
