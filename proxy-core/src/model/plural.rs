//! Counts with their nouns.

use std::fmt::Display;

/// Returns the count with the noun, which is given in the singular: `1 node`, `2 nodes`, `2 addresses`, `2 replies`.
pub fn plural(count: impl Display, noun: &str) -> String {
    let count = count.to_string();
    match noun.strip_suffix('y') {
        _ if count == "1" => format!("{count} {noun}"),
        Some(stem) => format!("{count} {stem}ies"),
        None if noun.ends_with('s') => format!("{count} {noun}es"),
        None => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::plural;

    #[test]
    fn only_one_is_singular() {
        let of = |noun| [0, 1, 21].map(|count| plural(count, noun)).join(", ");
        assert_eq!(of("node"), "0 nodes, 1 node, 21 nodes");
        assert_eq!(of("address"), "0 addresses, 1 address, 21 addresses");
        assert_eq!(of("reply"), "0 replies, 1 reply, 21 replies");
    }
}
