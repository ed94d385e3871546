use std::io::Write as _;

use rstest::rstest;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::api::connect::Address;

/// The table of Go's `httpproxy` tests, with more ports and addresses.
#[rstest]
#[case("", "10.0.0.1", false)]
#[case("", "localhost", true)]
#[case("", "127.0.0.9", true)]
#[case("", "[::1]", true)]
#[case("*", "kube.example.com", true)]
#[case("10.0.0.0/8", "10.96.0.1", true)]
#[case("10.0.0.0/8", "11.96.0.1", false)]
#[case("10.0.0.0/8", "ten.example.com", false)]
#[case("fd00::/8", "[fd00:96::1]", true)]
#[case("192.168.1.1", "192.168.1.1", true)]
#[case("192.168.1.1:6443", "192.168.1.1", true)]
#[case("192.168.1.1:443", "192.168.1.1", false)]
#[case("2001:db8::1", "[2001:db8::1]", true)]
#[case("[2001:db8::1]:6443", "[2001:db8::1]", true)]
#[case("[2001:db8::1]:80", "[2001:db8::1]", false)]
#[case("example.com", "example.com", true)]
#[case("example.com", "kube.example.com", true)]
#[case("example.com", "notexample.com", false)]
#[case(".example.com", "kube.example.com", true)]
#[case(".example.com", "example.com", false)]
#[case("*.example.com", "kube.example.com", true)]
#[case("*.example.com", "example.com", false)]
#[case("example.com:6443", "kube.example.com", true)]
#[case("example.com:80", "kube.example.com", false)]
#[case("a.test, KUBE.Example.com ,", "kube.EXAMPLE.com", true)]
#[case(",:80, .,", "kube.example.com", false)]
fn no_proxy_follows_the_rules_of_go(#[case] excepted: &str, #[case] host: &str, #[case] expected: bool) {
    assert_eq!(is_direct(host, 6443, excepted), expected);
}

fn uri(text: &str) -> Uri {
    text.parse().unwrap()
}

#[test]
fn only_a_proxy_from_the_environment_heeds_no_proxy() {
    let (proxy, server) = (uri("http://proxy:3128"), uri("https://10.0.0.1:6443"));
    let used = |environment, excepted| {
        select(Some(&proxy), &server, environment, excepted).unwrap().map(|found| found.uri().to_string())
    };
    let expected = Some("http://proxy:3128/".to_owned());
    assert_eq!(used(Some("http://proxy:3128"), ""), expected);
    assert_eq!(used(Some("http://proxy:3128"), "10.0.0.0/8"), None);
    assert_eq!(used(Some("http://other:3128"), "10.0.0.0/8"), expected, "it is that of the kubeconfig");
    assert_eq!(used(None, "*"), expected);
    let plain = select(Some(&proxy), &uri("http://10.0.0.1"), Some("http://proxy:3128"), "").unwrap();
    assert!(plain.is_none(), "HTTPS_PROXY is for https");
    assert!(select(None, &server, None, "").unwrap().is_none());
}

#[test]
fn credentials_of_a_proxy_are_sent_apart() {
    let proxy = uri("http://user:p%40ss@proxy:3128");
    let found = select(Some(&proxy), &uri("https://10.0.0.1"), None, "").unwrap().unwrap();
    assert_eq!(found.uri().to_string(), "http://proxy:3128/");
    assert_eq!(found.basic_auth().unwrap(), "Basic dXNlcjpwQHNz");
}

#[rstest]
#[case("socks5://user:secret@proxy:1080", "socks5://proxy")]
#[case("https://user:secret@proxy:3129", "https://proxy")]
fn a_proxy_that_cannot_be_used_is_named_with_the_way_out(#[case] proxy: &str, #[case] named: &str) {
    let error = select(Some(&uri(proxy)), &uri("https://10.0.0.1:6443"), None, "").err().unwrap().to_string();
    for part in [named, "HTTPS_PROXY", "proxy-url", "add 10.0.0.1 to NO_PROXY"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert!(!error.contains("secret"), "{error}");
}

/// A proxy that answers the request for a tunnel, and then is the API server itself.
#[tokio::test]
async fn a_server_is_reached_through_the_proxy_of_the_kubeconfig() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = listener.local_addr().unwrap();
    let seen = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut requests = Vec::new();
        for answer in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"] {
            let mut text = Vec::new();
            while !text.ends_with(b"\r\n\r\n") {
                text.push(stream.read_u8().await.unwrap());
            }
            requests.push(String::from_utf8(text).unwrap());
            stream.write_all(answer.as_bytes()).await.unwrap();
        }
        requests
    });
    let mut file = tempfile::NamedTempFile::new().unwrap();
    write!(
        file,
        "{{apiVersion: v1, kind: Config, current-context: c, contexts: [{{name: c, context: {{cluster: k, user: u}}}}], \
         clusters: [{{name: k, cluster: {{server: 'http://kube.test:6443', proxy-url: 'http://user:word@{place}'}}}}], \
         users: [{{name: u, user: {{}}}}]}}"
    )
    .unwrap();
    let kubeconfig = kube::config::Kubeconfig::read_from(file.path()).unwrap();
    let options = kube::config::KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.unwrap();
    let client = Address { url: config.cluster_url.clone(), name: None }.client(&config).unwrap();
    let answer = client.request_text(http::Request::get("/version").body(Vec::new()).unwrap()).await;
    assert_eq!(answer.unwrap(), "ok");
    let requests = seen.await.unwrap();
    assert!(requests[0].starts_with("CONNECT kube.test:6443 HTTP/1.1\r\n"), "{requests:?}");
    assert!(requests[0].contains("Proxy-Authorization: Basic dXNlcjp3b3Jk\r\n"), "{requests:?}");
    assert!(requests[1].starts_with("GET /version "), "{requests:?}");
}
