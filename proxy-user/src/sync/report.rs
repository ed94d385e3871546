//! Problems of objects in the log: once when they begin, once when they end.

use std::collections::BTreeMap;

use crate::model::Problem;

/// What makes two problems the same: messages hold figures that change with every attempt.
fn by_place(problems: &[Problem]) -> BTreeMap<(&str, &str), &Problem> {
    // The first of a place counts.
    problems.iter().rev().map(|problem| ((&*problem.object, &*problem.field), problem)).collect()
}

/// Problems that began, and problems that ended, from one list to the next.
fn changes<'a>(before: &'a [Problem], after: &'a [Problem]) -> (Vec<&'a Problem>, Vec<&'a Problem>) {
    let (before, after) = (by_place(before), by_place(after));
    let begun = after.iter().filter(|(place, _)| !before.contains_key(*place)).map(|(_, p)| *p).collect();
    let ended = before.iter().filter(|(place, _)| !after.contains_key(*place)).map(|(_, p)| *p).collect();
    (begun, ended)
}

/// Problems that began, from one list to the next.
pub fn problems_begun<'a>(before: &'a [Problem], after: &'a [Problem]) -> Vec<&'a Problem> {
    changes(before, after).0
}

/// Logs what changed.
pub(super) fn log(before: &[Problem], after: &[Problem]) {
    if before == after {
        return;
    }
    let (begun, ended) = changes(before, after);
    for Problem { object, field, message } in begun {
        tracing::warn!(object, field, problem = message, "a part of an object is not in force");
    }
    for Problem { object, field, .. } in ended {
        tracing::info!(object, field, "the problem is solved");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problem(object: &str, field: &str, message: &str) -> Problem {
        Problem { object: object.into(), field: field.into(), message: message.into() }
    }

    #[test]
    fn a_problem_is_told_when_it_begins_and_when_it_ends() {
        let one = problem("Service default/a", "spec.ports", "no room for 5 slots");
        let other = problem("Service default/b", "spec.ports", "no room for 5 slots");
        let (both, first) = (vec![one.clone(), other.clone()], vec![one.clone()]);
        assert_eq!(changes(&[], &both), (vec![&one, &other], vec![]));
        assert_eq!(changes(&both, &both), (vec![], vec![]));
        assert_eq!(changes(&both, &first), (vec![], vec![&other]));
        assert_eq!(changes(&first, &[]), (vec![], vec![&one]));
    }

    #[test]
    fn other_figures_are_the_same_problem_and_another_field_is_another() {
        let before = [problem("Service default/a", "spec.ports", "no room for 5 slots: 3 are free")];
        let after = [
            problem("Service default/a", "spec.ports", "no room for 5 slots: 2 are free"),
            problem("Service default/a", "spec.clusterIP", "x"),
        ];
        assert_eq!(changes(&before, &after), (vec![&after[1]], vec![]));
    }
}
