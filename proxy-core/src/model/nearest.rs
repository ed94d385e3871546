//! Proposals for a mistyped name.

/// Minimum similarity of a proposed name, from 0 to 1.
const ALIKE: f64 = 0.55;
/// Maximum number of proposed names.
const MOST: usize = 3;

/// Maximum length of a name in Kubernetes. A longer text is compared with no name, since anyone may send it.
const MAX_NAME: usize = 253;

/// Returns the names that are most similar to `asked`, the most similar first.
pub fn nearest<'a>(asked: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    if asked.len() > MAX_NAME {
        return Vec::new();
    }
    let asked = asked.to_lowercase();
    let score = |name: &str| {
        let name = name.to_lowercase();
        // A correctly typed part of a name is a match, however long the rest is.
        let is_part = asked.len() >= 3 && (name.contains(&asked) || asked.contains(&name) && name.len() >= 3);
        let alike = strsim::normalized_damerau_levenshtein(&asked, &name);
        if is_part { alike.max(ALIKE) } else { alike }
    };
    let mut found: Vec<(f64, &str)> = known.into_iter().map(|name| (score(name), name)).collect();
    found.retain(|(score, _)| *score >= ALIKE);
    found.sort_by(|(a, one), (b, other)| b.total_cmp(a).then_with(|| one.cmp(other)));
    found.dedup_by_key(|(_, name)| *name);
    found.into_iter().take(MOST).map(|(_, name)| name).collect()
}

/// Returns `; did you mean a, b or c?`, or an empty string if there are no names.
pub fn did_you_mean<S: AsRef<str>>(names: &[S]) -> String {
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    match names.as_slice() {
        [] => String::new(),
        [one] => format!("; did you mean {one}?"),
        [first @ .., last] => format!("; did you mean {} or {last}?", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("servcies", &["services", "services6"])]
    #[case("back", &["backends"])]
    #[case("Flows", &["flows"])]
    #[case("zzz", &[])]
    fn nearest_names_are_found_for_typing_errors(#[case] asked: &str, #[case] expected: &[&str]) {
        assert_eq!(nearest(asked, ["services", "services6", "backends", "flows"]), expected);
    }

    #[test]
    fn text_longer_than_a_name_is_compared_with_no_name() {
        let compared = std::cell::Cell::new(0);
        let known = || ["services"].into_iter().inspect(|_| compared.set(compared.get() + 1));
        assert_eq!((nearest(&"s".repeat(254), known()), compared.get()), (vec![], 0));
        assert_eq!((nearest(&"s".repeat(253), known()), compared.get()), (vec![], 1));
    }

    #[test]
    fn in_words() {
        assert_eq!(did_you_mean::<&str>(&[]), "");
        assert_eq!(did_you_mean(&["a"]), "; did you mean a?");
        assert_eq!(did_you_mean(&["a", "b", "c"]), "; did you mean a, b or c?");
    }
}
