//! Checks of each request for the page, and the security headers of each answer.
//!
//! A page of another site can make an administrator's browser send requests to this server, under a host name that resolves to
//! this server (DNS rebinding). So `Host` must be an address, `localhost`, or a name that this server knows, and requests made
//! by another origin are refused (`Origin`, `Sec-Fetch-Site`).

use std::net::IpAddr;
use std::str::FromStr as _;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, HOST, ORIGIN, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

/// Host names that requests to this server may use.
pub(super) type Names = Arc<Vec<String>>;

/// The browser loads only this server's files, and does not turn text into markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'";

const SENT: [(HeaderName, &str); 6] = [
    (CONTENT_SECURITY_POLICY, POLICY),
    (X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (REFERRER_POLICY, "no-referrer"),
    (CACHE_CONTROL, "no-store"),
    (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
];

/// Refuses requests made neither by the page itself nor by a person, and adds the headers to each answer.
pub(super) async fn check(State(names): State<Names>, request: Request, next: Next) -> Response {
    let refused = refusal(&names, request.method(), request.headers(), request.uri().path());
    let mut response = match refused {
        Some((status, why)) => (status, why).into_response(),
        None => next.run(request).await,
    };
    let headers = response.headers_mut();
    for (name, value) in SENT {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Returns why a request is refused; `None` if it is allowed.
pub(super) fn refusal(
    names: &[String],
    method: &Method,
    headers: &HeaderMap,
    path: &str,
) -> Option<(StatusCode, &'static str)> {
    if ![Method::GET, Method::HEAD].contains(method) {
        return Some((StatusCode::METHOD_NOT_ALLOWED, "the page is read-only: use GET or HEAD"));
    }
    let Some(host) = only(headers, &HOST) else {
        return Some((StatusCode::BAD_REQUEST, "a request must have exactly one Host header"));
    };
    if !is_known(host, names) {
        return Some((
            StatusCode::FORBIDDEN,
            "open the page with an IP address, localhost or the name of the node: other names are refused, as protection against DNS rebinding",
        ));
    }
    let from_elsewhere = (StatusCode::FORBIDDEN, "requests from pages of another origin are refused");
    let is_own = |origin: &str| {
        let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        rest.is_some_and(|rest| rest.eq_ignore_ascii_case(host))
    };
    if headers.contains_key(ORIGIN) && !only(headers, &ORIGIN).is_some_and(is_own) {
        return Some(from_elsewhere);
    }
    // A link on another site may lead to the page, but other sites may not use the page's data and files.
    let site = headers.get("sec-fetch-site").map(HeaderValue::as_bytes);
    let is_ours = site.is_none_or(|site| [&b"same-origin"[..], b"none"].contains(&site));
    (path != "/" && !is_ours).then_some(from_elsewhere)
}

/// Returns the value of a header that occurs exactly once.
fn only<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?;
    value.to_str().ok().filter(|_| values.next().is_none())
}

fn is_known(host: &str, names: &[String]) -> bool {
    let Ok(authority) = Authority::from_str(host) else { return false };
    if host.contains('@') {
        return false;
    }
    let host = authority.host();
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    bare.parse::<IpAddr>().is_ok()
        || host.eq_ignore_ascii_case("localhost")
        || names.iter().any(|name| name.eq_ignore_ascii_case(host))
}

#[cfg(test)]
mod tests;
