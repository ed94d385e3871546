//! Output of the demo: plain text for 80 to 100 columns, with colours on a terminal.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _, stdout};

use super::traffic::Tally;

const BOLD: &str = "1";
const DIM: &str = "2";
const GREEN: &str = "32";
const CYAN: &str = "36";
/// Length of the longest bar, in characters.
const BAR: u64 = 40;
/// Environment variable that asks for colours if standard output is not a terminal.
const COLOURED: &str = "CLICOLOR_FORCE";
/// Longer lines of other programs are wrapped at this column.
const WIDTH: usize = 100;

/// Writes one line to standard output.
pub(super) fn put(text: &str) {
    // Ignore a closed standard output: the demo still has to remove its cluster.
    let mut out = stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// The terminal, or the file or pipe in its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Screen {
    is_coloured: bool,
    width: usize,
}

impl Screen {
    /// Uses colours on a terminal or if forced, but never if `NO_COLOR` is set.
    pub(super) fn new() -> Self {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_wanted = is_set(COLOURED) || stdout().is_terminal();
        Self { is_coloured: is_wanted && !is_set("NO_COLOR"), width: WIDTH }
    }

    fn paint(self, colour: &str, text: impl Display) -> String {
        if self.is_coloured { format!("\x1b[{colour}m{text}\x1b[0m") } else { text.to_string() }
    }

    /// Prints the title of a step, and one sentence about what it shows.
    pub(super) fn step(self, number: u8, title: &str, sentence: &str) {
        self.title(&format!("{number}. {title}"));
        put(&format!("   {sentence}"));
    }

    /// Prints an empty line and a line in bold.
    pub(super) fn title(self, text: &str) {
        put("");
        put(&self.paint(BOLD, text));
    }

    /// Prints a command as a user would type it.
    pub(super) fn command(self, line: &str) {
        put("");
        put(&format!("   {} {}", self.paint(DIM, "$"), self.paint(CYAN, line)));
    }

    /// Prints the text of a program, or a picture; wraps long lines.
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

    /// Prints the first `lines` lines of a text.
    pub(super) fn head(self, text: &str, lines: usize) {
        let all: Vec<_> = text.lines().collect();
        self.text(&all.iter().take(lines).copied().collect::<Vec<_>>().join("\n"));
        if let Some(more) = all.len().checked_sub(lines).filter(|more| *more > 0) {
            self.text(&self.paint(DIM, format_args!("... {more} more lines")));
        }
    }

    /// Prints a fact that the demo has checked.
    pub(super) fn seen(self, fact: &str) {
        put(&format!("   {} {fact}", self.paint(GREEN, "ok:")));
    }

    /// Prints a bar for each pod, also for a pod without connections.
    pub(super) fn bars(self, tally: &Tally, pods: &[&str]) {
        let most = pods.iter().map(|pod| tally.of(pod)).max().unwrap_or_default().max(1);
        for pod in pods {
            let count = tally.of(pod);
            let bar = "#".repeat(usize::try_from(count * BAR / most).unwrap_or_default());
            self.text(&format!("{pod}  {count:>5}  {}", self.paint(GREEN, bar)));
        }
    }
}
