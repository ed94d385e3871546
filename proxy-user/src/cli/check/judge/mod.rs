//! Evaluates the facts: a pure function that returns a line for each check.

mod environment;
mod installed;
mod kernel;
mod line;
mod network;
mod others;

use line::some;
pub use line::{Line, Outcome};

use super::facts::Facts;

/// Returns all lines, in groups.
pub fn judge(facts: &Facts) -> Vec<Line> {
    let pre = facts.installed.is_none();
    let mut lines = Vec::new();
    let mut add = |group: &'static str, of_group: Vec<Line>| {
        lines.extend(of_group.into_iter().map(|line| Line { group, ..line }));
    };
    add("kernel", kernel::judge(&facts.kernel));
    add("node", environment::judge(&facts.environment, pre));
    add("network", network::judge(&facts.network));
    add("other software", others::judge(&facts.others, pre));
    add("api server", vec![others::api(&facts.api)]);
    if let Some(installed) = &facts.installed {
        add("agent", installed::judge(installed));
    }
    lines
}

#[cfg(test)]
mod tests;
