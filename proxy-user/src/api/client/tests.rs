use std::io::Write;

use super::*;

fn kubeconfig(server: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         clusters: [{{name: k, cluster: {{server: '{server}'}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n"
    );
    file.write_all(text.as_bytes()).unwrap();
    file
}

fn options(path: &std::path::Path, server: Option<&str>) -> Options {
    Options { kubeconfig: Some(path.to_owned()), server: server.map(str::to_owned) }
}

#[tokio::test]
async fn a_server_that_is_away_is_no_error() {
    let file = kubeconfig("https://127.0.0.1:1");
    assert!(connect(&options(file.path(), None)).await.is_ok());
    assert!(connect(&options(file.path(), Some("https://127.0.0.1:2"))).await.is_ok());
}

#[tokio::test]
async fn a_missing_file_is_named() {
    let error = connect(&options("/nonexistent/config".as_ref(), None)).await.err().expect("no such file");
    assert_eq!(error.to_string(), "cannot use the kubeconfig /nonexistent/config; check --kubeconfig");
}

#[tokio::test]
async fn what_is_no_url_is_refused() {
    let file = kubeconfig("https://127.0.0.1:1");
    for url in ["", "127.0.0.1:6443", "/path", "ftp://127.0.0.1"] {
        let result = connect(&options(file.path(), Some(url))).await;
        assert!(matches!(result, Err(ConnectError::Server { .. })), "{url}");
    }
}
