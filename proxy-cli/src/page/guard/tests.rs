use axum::http::HeaderName;
use rstest::rstest;

use super::*;

/// Returns the status with which a request is refused; 0 if it is allowed.
fn status(method: &Method, path: &str, headers: &[(&str, &str)]) -> u16 {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        map.append(HeaderName::try_from(*name).unwrap(), HeaderValue::from_str(value).unwrap());
    }
    refusal(&["node-a".to_owned()], method, &map, path).map_or(0, |(status, _)| status.as_u16())
}

#[rstest]
#[case::loopback("127.0.0.1:10249", 0)]
#[case::loopback_v6("[::1]:10249", 0)]
#[case::address("192.0.2.7", 0)]
#[case::localhost("LocalHost:8249", 0)]
#[case::node("node-a:10249", 0)]
#[case::rebound("evil.example:10249", 403)]
#[case::looks_like_one("127.0.0.1.evil.example", 403)]
#[case::user("localhost@evil.example", 403)]
#[case::user_of_ours("evil@localhost", 403)]
#[case::longer("node-a.evil.example", 403)]
#[case::empty("", 403)]
fn request_with_an_unknown_host_is_refused(#[case] host: &str, #[case] expected: u16) {
    for path in ["/", "/page/main.js", "/page/events"] {
        assert_eq!(status(&Method::GET, path, &[("host", host)]), expected, "{path}");
    }
}

#[test]
fn a_request_has_one_host_and_reads() {
    let host = ("host", "localhost:1");
    assert_eq!(status(&Method::GET, "/", &[]), 400);
    assert_eq!(status(&Method::GET, "/", &[host, ("host", "evil.example")]), 400);
    assert_eq!(status(&Method::HEAD, "/", &[host]), 0);
    for method in [Method::POST, Method::PUT, Method::DELETE, Method::OPTIONS] {
        assert_eq!(status(&method, "/", &[host]), 405);
    }
}

#[rstest]
#[case("/page/events", "origin", "http://localhost:1", 0)]
#[case("/page/events", "origin", "http://localhost:2", 403)]
#[case("/page/events", "origin", "https://evil.example", 403)]
#[case("/page/events", "origin", "null", 403)]
#[case("/", "origin", "https://evil.example", 403)]
#[case("/page/events", "sec-fetch-site", "same-origin", 0)]
#[case("/page/events", "sec-fetch-site", "none", 0)]
#[case("/page/events", "sec-fetch-site", "same-site", 403)]
#[case("/page/main.js", "sec-fetch-site", "cross-site", 403)]
#[case::a_link("/", "sec-fetch-site", "cross-site", 0)]
fn other_origins_are_refused(
    #[case] path: &str,
    #[case] name: &str,
    #[case] value: &str,
    #[case] expected: u16,
) {
    assert_eq!(status(&Method::GET, path, &[("host", "localhost:1"), (name, value)]), expected);
}
