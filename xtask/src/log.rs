//! Messages of the task runner: on standard error, so that standard output has only a command's own output.

use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, Instant};

/// Prints a line.
pub fn line(text: impl Display) {
    // Writing fails if standard error is closed; there is no other place for the message.
    let _ = writeln!(std::io::stderr(), "{text}");
}

/// Prints the start of a step that takes a while.
pub fn step(text: impl Display) {
    line(format_args!("==> {text}"));
}

/// Prints an error with its causes, the outermost first.
pub fn error(error: &anyhow::Error) {
    line(format_args!("error: {error:#}"));
}

/// Prints `text`, does the work, and prints how long it took.
pub fn timed<T>(text: &str, work: impl FnOnce() -> anyhow::Result<T>) -> anyhow::Result<T> {
    step(text);
    let start = Instant::now();
    let done = work()?;
    line(format_args!("    {text}: {}", seconds(start.elapsed())));
    Ok(done)
}

/// Formats a duration: `0.4 s`, `12 s`, `3 min 5 s`.
pub fn seconds(time: Duration) -> String {
    let whole = time.as_secs();
    match whole {
        0..10 => format!("{:.1} s", time.as_secs_f64()),
        10..60 => format!("{whole} s"),
        _ => format!("{} min {} s", whole / 60, whole % 60),
    }
}
