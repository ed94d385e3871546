//! Finds words that must not be in the project: signs of unfinished work, paths of one machine, and vague subjects.

use super::source::{Finding, SourceFile};

/// Refused in all files. Each word is written in two pieces, so that this file does not contain it.
const ANYWHERE: [&str; 5] = [
    concat!("FIX", "ME"),
    concat!("TO", "DO:"),
    concat!("/wo", "rk/"),
    concat!("/ro", "ot/"),
    concat!("/ho", "me/"),
];

/// Whole words that hide the subject of a sentence; see CONTRIBUTING.md, "How we write".
const VAGUE: [&str; 5] = [
    concat!("no", "body"),
    concat!("some", "body"),
    concat!("every", "body"),
    concat!("who", "ever"),
    concat!("when", "ce"),
];

/// Returns the vague words of a line.
fn vague(line: &str) -> impl Iterator<Item = &'static str> {
    let words = line.split(|c: char| !c.is_ascii_alphabetic());
    words.filter_map(|word| VAGUE.into_iter().find(|vague| word.eq_ignore_ascii_case(vague)))
}

pub(super) fn check(file: &SourceFile) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in file.text.lines().enumerate() {
        for word in ANYWHERE.iter().filter(|word| line.contains(**word)) {
            findings.push(Finding {
                file: file.path.clone(),
                line: number + 1,
                what: format!("holds `{word}`: unfinished work, or one machine's path"),
            });
        }
        for word in vague(line) {
            findings.push(Finding {
                file: file.path.clone(),
                line: number + 1,
                what: format!("contains `{word}`: name the program, host or person that is meant"),
            });
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<usize> {
        check(&SourceFile { path: path.into(), text: text.into() })
            .into_iter()
            .map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn words_that_hide_who_acts_are_found() {
        assert_eq!(found("a.rs", &format!("// {} reads it.", VAGUE[0])), [1]);
        assert_eq!(found("docs/a.md", &format!("{}'s", VAGUE[1].to_uppercase())), [1]);
        assert!(found("docs/a.md", &format!("{}es, anyone", VAGUE[0])).is_empty());
    }

    #[test]
    fn a_machines_path_is_found_in_any_file() {
        assert_eq!(found("docs/a.md", &format!("see {}x", ANYWHERE[2])), [1]);
        assert!(found("docs/a.md", "see /sys/fs/bpf/ballast/").is_empty());
    }
}
