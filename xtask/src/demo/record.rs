//! `cargo xtask demo --record`: draws a picture of a run, for README.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anstyle_svg::Term;
use anyhow::{Context as _, Result, ensure};

use super::screen::{self, COLOURED};
use crate::log;

/// Steps in the picture: an endpoint is removed and added; the agent is killed.
const STEPS: [u8; 2] = [4, 6];

/// Runs this program's demo once more with `options`, prints its output, and draws some of its steps to `file` as SVG.
pub(super) fn record(options: &[&Path], file: &Path) -> Result<()> {
    let program = std::env::current_exe().context("cannot tell which program this is")?;
    let mut child = Command::new(program)
        .arg("demo")
        .args(options)
        .env(COLOURED, "1")
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the demo")?;
    let output = child.stdout.take().context("the demo has no standard output")?;
    let mut lines = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line.context("cannot read what the demo prints")?;
        screen::put(&line);
        lines.push(line);
    }
    let status = child.wait().context("cannot wait for the demo")?;
    ensure!(status.success(), "the demo failed ({status}): nothing is recorded");
    fs::write(file, picture(&lines)?).with_context(|| format!("cannot write {}", file.display()))?;
    log::line(format_args!("the picture is in {}", file.display()));
    Ok(())
}

/// Returns what the demo printed in [`STEPS`], as SVG.
fn picture(lines: &[String]) -> Result<String> {
    let mut shown = vec!["$ cargo xtask demo"];
    for step in STEPS {
        let lines = step_lines(lines, step);
        ensure!(!lines.is_empty(), "the demo printed no step {step}");
        shown.extend(lines.iter().map(String::as_str));
    }
    Ok(Term::new().render_svg(shown.join("\n").trim_end()))
}

/// Returns the lines of one step, with the empty line before its title.
fn step_lines(lines: &[String], step: u8) -> &[String] {
    let title = |step: u8| {
        let title = format!("\x1b[1m{step}. ");
        lines.iter().position(|line| line.starts_with(&title))
    };
    let Some(first) = title(step) else { return &[] };
    let end = title(step + 1).map_or(lines.len(), |next| next - 1);
    lines.get(first - 1..end).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed() -> Vec<String> {
        (1..=8)
            .flat_map(|step| {
                [String::new(), format!("\x1b[1m{step}. Title {step}\x1b[0m"), format!("   text {step}")]
            })
            .collect()
    }

    #[test]
    fn a_picture_has_its_steps_and_no_other() {
        let picture = picture(&printed()).unwrap();
        for step in 1..=8 {
            assert_eq!(picture.contains(&format!("text {step}")), STEPS.contains(&step), "step {step}");
        }
    }

    #[test]
    fn a_step_that_is_missing_is_named() {
        let lines: Vec<_> = printed().into_iter().filter(|line| !line.contains("Title 6")).collect();
        assert!(picture(&lines).unwrap_err().to_string().contains("step 6"));
    }
}
