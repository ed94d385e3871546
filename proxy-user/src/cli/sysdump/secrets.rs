//! Removes secrets from text: logs, answers of the agent, files.

/// Text that replaces a secret.
const LEFT_OUT: &str = "(redacted)";

/// If a name contains one of these words, its value is a secret: `token: x`, `"client-key-data": "x"`, `password=x`.
const NAMES: [&str; 8] =
    ["token", "password", "passwd", "secret", "authorization", "-key-data", "apikey", "api-key"];

/// Names that contain such a word, but whose values are not secrets.
const HARMLESS: [&str; 3] = ["tokens_", "token_bucket", "tokenbucket"];

/// Returns the text without private keys, tokens, passwords, and user names and passwords in URLs.
pub(super) fn left_out(text: &str) -> String {
    let mut result = String::with_capacity(text.len());
    let mut in_key = false;
    for line in text.split_inclusive('\n') {
        // A key in JSON is one line with `\n` in it, so it begins and ends on the same line.
        let (begins, ends) =
            (line.contains("-----BEGIN") && line.contains("PRIVATE KEY"), line.contains("-----END"));
        if begins && !in_key {
            let before = line.split("-----BEGIN").next().unwrap_or_default();
            result.push_str(before);
            result.push_str(LEFT_OUT);
            result.push('\n');
        }
        if in_key || begins {
            in_key = !ends;
            continue;
        }
        result.push_str(&of_line(line));
    }
    result
}

fn of_line(line: &str) -> String {
    let line = values(line);
    let mut result = String::with_capacity(line.len());
    let mut bearer = false;
    for word in line.split_inclusive(|c: char| c.is_whitespace() || "\"',;()[]{}".contains(c)) {
        let bare = word.trim_end_matches(|c: char| c.is_whitespace() || "\"',;()[]{}".contains(c));
        let end = word.get(bare.len()..).unwrap_or_default();
        if !bare.is_empty() && (bearer || is_token(bare)) {
            result.push_str(LEFT_OUT);
        } else {
            result.push_str(&without_user(bare));
        }
        result.push_str(end);
        if !bare.is_empty() {
            bearer = ["bearer", "basic"].contains(&bare.to_lowercase().as_str());
        }
    }
    result
}

/// Whether a word is a JSON web token (as of service accounts): three parts of base64, of which the first begins with `{"`.
fn is_token(word: &str) -> bool {
    word.split(['=', ':']).any(|part| part.starts_with("eyJ") && part.len() > 20)
}

/// Returns a URL without the user name and password in front of its host.
pub(in crate::cli) fn without_user(word: &str) -> String {
    let Some((scheme, rest)) = word.split_once("://") else { return word.to_owned() };
    let authority = rest.split('/').next().unwrap_or_default();
    match authority.rsplit_once('@') {
        Some((user, _)) => format!("{scheme}://{LEFT_OUT}{}", rest.get(user.len()..).unwrap_or_default()),
        None => word.to_owned(),
    }
}

/// Returns the line without the values of names that indicate a secret.
fn values(line: &str) -> String {
    let mut result = String::with_capacity(line.len());
    let mut rest = line;
    while let Some((before, after)) = split_secret(rest) {
        result.push_str(before);
        // Quotes and spaces in front of the value are kept.
        let value = after.trim_start_matches([' ', '"', '\'']);
        result.push_str(after.get(..after.len() - value.len()).unwrap_or_default());
        let is_quoted = after.len() != value.len() && after.trim_start_matches(' ').starts_with(['"', '\'']);
        let end = if is_quoted {
            value.find(['"', '\'', '\n'])
        } else {
            value.find([',', ';', '}', ']', '\n']).or_else(|| value.find(' '))
        };
        let end = end.unwrap_or(value.len());
        if !value.get(..end).unwrap_or_default().trim().is_empty() {
            result.push_str(LEFT_OUT);
        }
        rest = value.get(end..).unwrap_or_default();
    }
    result.push_str(rest);
    result
}

/// Splits the text after the `:` or `=` behind the first name that indicates a secret.
fn split_secret(text: &str) -> Option<(&str, &str)> {
    let mut from = 0;
    while let Some(found) = text.get(from..)?.find([':', '=']) {
        let at = from + found;
        let name = text.get(..at)?.trim_end_matches([' ', '"', '\'']);
        let is_part = |c: char| c.is_alphanumeric() || c == '_' || c == '-' || c == '.';
        let name = name.rsplit(|c: char| !is_part(c)).next().unwrap_or_default().to_lowercase();
        let is_secret = NAMES.iter().any(|secret| name.contains(secret))
            && !HARMLESS.iter().any(|harmless| name.contains(harmless));
        if is_secret {
            return Some((text.get(..=at)?, text.get(at + 1..)?));
        }
        from = at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const JWT: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IjEifQ.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJlLW9mLWl0";

    #[rstest]
    #[case("level=INFO token=abc123 next=1\n", "abc123")]
    #[case("    token: abc123\n", "abc123")]
    #[case("{\"client-key-data\": \"LS0tLS1\", \"a\": 1}", "LS0tLS1")]
    #[case("{\"clientSecret\":\"s3cr3t\"}", "s3cr3t")]
    #[case("password = hunter2\n", "hunter2")]
    #[case("Authorization: Bearer abcdef.ghijkl\n", "abcdef")]
    #[case("curl -H 'x: Bearer abcdef'\n", "abcdef")]
    #[case("asked https://me:word@10.0.0.1:6443/api\n", "word")]
    #[case("-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----\n", "MIIEow")]
    #[case("x\n-----BEGIN EC PRIVATE KEY-----\nMIIEow\nno end", "MIIEow")]
    #[case("{\"key\": \"-----BEGIN PRIVATE KEY-----\\nMIIEow\\n-----END PRIVATE KEY-----\"}\n", "MIIEow")]
    fn a_secret_is_left_out(#[case] text: &str, #[case] secret: &str) {
        let cleaned = left_out(text);
        assert!(!cleaned.contains(secret) && cleaned.contains(LEFT_OUT), "{cleaned}");
    }

    #[test]
    fn a_token_of_a_service_account_is_left_out_wherever_it_stands() {
        for text in [JWT.to_owned(), format!("got {JWT}."), format!("\"{JWT}\""), format!("url?t={JWT}&x=1")]
        {
            let cleaned = left_out(&text);
            assert!(!cleaned.contains("eyJ"), "{cleaned}");
        }
    }

    #[rstest]
    #[case("{\"address\": \"10.96.0.10:80\", \"service\": \"default/web:http\"}\n")]
    #[case("ballast_map_entries{map=\"services\"} 6\n")]
    #[case("rate_limits: the TokenBucket of a CPU\n")]
    #[case("https://10.0.0.1:6443/ answers\n")]
    fn text_without_secrets_is_unchanged(#[case] text: &str) {
        assert_eq!(left_out(text), text);
    }
}
