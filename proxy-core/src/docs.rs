//! Addresses of the documentation.

/// Returns the address of a page, like `kubectl.md`: on the web in a program that was built as a part of a release, and otherwise
/// in the repository.
pub fn page(page: &str) -> String {
    format!("{}/{page}", option_env!("BALLAST_DOCS").unwrap_or("docs"))
}
