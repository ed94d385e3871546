use std::io::Write;

use rstest::rstest;
use secrecy::ExposeSecret as _;

use super::*;

fn kubeconfig(server: &str) -> tempfile::NamedTempFile {
    with_user(server, "token: t")
}

/// Returns a kubeconfig with these fields of the user.
fn with_user(server: &str, user: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{{name: c, context: {{cluster: k, user: u}}}}]\n\
         clusters: [{{name: k, cluster: {{server: '{server}'}}}}]\nusers: [{{name: u, user: {{{user}}}}}]\n"
    );
    file.write_all(text.as_bytes()).unwrap();
    file
}

async fn connect_to(path: &std::path::Path, servers: &[&str]) -> Result<Connection, ConnectError> {
    let servers = servers.iter().map(|url| (*url).to_owned()).collect();
    let options = Options { kubeconfig: Some(path.to_owned()), servers };
    connect(&options, watch::Sender::default()).await
}

#[tokio::test]
async fn a_server_that_is_away_is_no_error() {
    let file = kubeconfig("https://127.0.0.1:1");
    let urls = |connection: Connection| -> Vec<String> {
        connection.servers.list().into_iter().map(|server| server.url.to_string()).collect()
    };
    assert_eq!(urls(connect_to(file.path(), &[]).await.unwrap()), ["https://127.0.0.1:1/"]);
    let two = connect_to(file.path(), &["https://127.0.0.1:2", "https://127.0.0.1:3"]).await.unwrap();
    assert_eq!(urls(two), ["https://127.0.0.1:2/", "https://127.0.0.1:3/"]);
}

#[tokio::test]
async fn a_missing_file_is_named() {
    let error = connect_to("/nonexistent/config".as_ref(), &[]).await.err().expect("no such file");
    let error = error.to_string();
    assert!(error.starts_with("cannot use the kubeconfig /nonexistent/config: No such file"), "{error}");
    assert!(error.contains("No such file") && error.contains("give another with --kubeconfig"), "{error}");
}

#[test]
fn broken_default_kubeconfig_is_named_with_its_cause() {
    let cause = || KubeconfigError::LoadContext("home".to_owned());
    let error = unusable(Some("/x/.kube/config".into()), &cause()).to_string();
    assert!(
        error.contains("the kubeconfig /x/.kube/config: failed to load current context: home"),
        "{error}"
    );
    let error = unusable(None, &cause()).to_string();
    assert!(
        error.starts_with("no API server found: $KUBECONFIG is not set, there is no ~/.kube/config"),
        "{error}"
    );
}

#[tokio::test]
async fn invalid_url_is_refused() {
    let file = kubeconfig("https://127.0.0.1:1");
    for url in ["", "foo:bar", "127.0.0.1:6443/path", "/path", "ftp://127.0.0.1"] {
        let result = connect_to(file.path(), &["https://127.0.0.1:1", url]).await;
        assert!(matches!(result, Err(ConnectError::Server { .. })), "{url}");
    }
}

#[tokio::test]
async fn a_server_without_a_scheme_gets_that_of_client_go() {
    for (more, expected) in [
        ("", "http://127.0.0.1:6443/"),
        (", insecure-skip-tls-verify: true", "https://127.0.0.1:6443/"),
        (
            ", certificate-authority-data: LS0tLS1CRUdJTiBDRVJUSUZJQ0FURS0tLS0tCkFBQUEKLS0tLS1FTkQgQ0VSVElGSUNBVEUtLS0tLQo=",
            "https://127.0.0.1:6443/",
        ),
    ] {
        let given = std::fs::read_to_string(kubeconfig("127.0.0.1:6443").path()).unwrap();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(given.replace("6443'", &format!("6443'{more}")).as_bytes()).unwrap();
        let options = Options { kubeconfig: Some(file.path().to_owned()), servers: vec![] };
        assert_eq!(load(&options).await.unwrap().cluster_url.to_string(), expected, "{more}");
        if !more.contains("data") {
            let given = connect_to(file.path(), &["127.0.0.1:2"]).await.unwrap().servers.list();
            assert_eq!(given[0].url.to_string(), expected.replace("6443", "2"));
        }
    }
    for server in ["foo:bar", "/path"] {
        let error = connect_to(kubeconfig(server).path(), &[]).await.err().expect("no server");
        assert!(matches!(error, ConnectError::Server { .. }), "{server}: {error}");
        let file = kubeconfig(server);
        let config = kubeconfig::read(Some(file.path()), &KubeConfigOptions::default()).await.unwrap();
        assert!(connect::command_client(config).is_err(), "{server}");
    }
}

/// Uses a kubeconfig or a service account if the machine has one.
#[tokio::test]
async fn given_server_without_a_kubeconfig_is_used() {
    let url = "http://127.0.0.1:2/".to_owned();
    let options = Options { kubeconfig: None, servers: vec![url.clone()] };
    let connection = connect(&options, watch::Sender::default()).await.unwrap();
    assert_eq!(connection.servers.list()[0].url.to_string(), url);
}

#[test]
fn server_without_kubeconfig_has_no_credentials() {
    let config =
        without_credentials(&["127.0.0.1:6443".to_owned(), "https://127.0.0.1:2".to_owned()]).unwrap();
    assert_eq!(config.cluster_url.to_string(), "http://127.0.0.1:6443/");
    assert!(!connect::uses_tls(&config) && config.auth_info.token_file.is_none());
    assert!(matches!(without_credentials(&[]), Err(ConnectError::NotFound)));
}

#[tokio::test]
async fn a_broken_file_is_named_without_its_lines() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"users: [{name: u, user: {token: secret}}]\nclusters: [\n").unwrap();
    let error = connect_to(file.path(), &[]).await.err().expect("no YAML").to_string();
    assert!(error.contains("line 2") && !error.contains('\n') && !error.contains("secret"), "{error}");
}

#[tokio::test]
async fn a_ca_without_certificate_is_refused() {
    let ca = tempfile::NamedTempFile::new().unwrap();
    let given = std::fs::read_to_string(kubeconfig("https://127.0.0.1:1").path()).unwrap();
    let text = given.replace("server:", &format!("certificate-authority: {}, server:", ca.path().display()));
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    assert!(matches!(connect_to(file.path(), &[]).await, Err(ConnectError::EmptyAuthority)));
}

#[tokio::test]
async fn a_failed_request_names_its_server() {
    let file = kubeconfig("https://127.0.0.1:1");
    let client = connect_to(file.path(), &[]).await.unwrap().client;
    let error = chain(&client.apiserver_version().await.unwrap_err());
    assert!(error.starts_with("https://127.0.0.1:1: client error (Connect)"), "{error}");
}

#[rstest]
#[case("https://192.0.2.1:6443", Some("192.0.2.1:6443"))]
#[case("https://[2001:db8::1]", Some("[2001:db8::1]:443"))]
#[case("http://192.0.2.3/", Some("192.0.2.3:80"))]
#[case("https://name:6443", None)]
fn address_of_a_server_is_known_without_a_resolver(#[case] url: &str, #[case] expected: Option<&str>) {
    let address = Address { url: url.parse().unwrap(), name: None };
    assert_eq!(address.socket().map(|at| at.to_string()).as_deref(), expected);
}

#[rstest]
#[case::token("token: \"abc\\n\"")]
#[case::yaml_block("token: \" abc\\r\\n\"")]
#[case::basic_and_empty_strings("token: abc, username: '', password: ''")]
#[case::certificates(
    "token: abc, client-certificate: '', client-certificate-data: '', client-key: '', client-key-data: ''"
)]
#[case::files("token: abc, tokenFile: ''")]
#[case::impersonation("token: abc, as: '', as-uid: ''")]
#[tokio::test]
async fn token_is_trimmed_and_empty_strings_are_not_set(#[case] user: &str) {
    let file =
        with_user("https://127.0.0.1:1', tls-server-name: '', certificate-authority: '', proxy-url: '", user);
    connect_to(file.path(), &[]).await.unwrap();
    let options = Options { kubeconfig: Some(file.path().to_owned()), servers: vec![] };
    let config = load(&options).await.unwrap();
    let user = config.auth_info;
    assert_eq!(user.token.unwrap().expose_secret(), "abc");
    assert_eq!((config.tls_server_name, config.root_cert), (None, None));
    assert_eq!(
        (user.username, user.token_file, user.client_certificate, user.impersonate),
        (None, None, None, None)
    );
    assert!(user.password.is_none() && user.client_key_data.is_none());
}

#[tokio::test]
async fn empty_data_beside_a_file_is_not_set() {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(Vec::new()).unwrap().self_signed(&key).unwrap();
    let ca = tempfile::NamedTempFile::new().unwrap();
    let undecodable = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    std::fs::write(ca.path(), certificate.pem() + undecodable).unwrap();
    let path = ca.path().display();
    let cluster =
        format!("https://127.0.0.1:1', certificate-authority-data: '', certificate-authority: '{path}");
    let file = kubeconfig(&cluster);
    let options = Options { kubeconfig: Some(file.path().to_owned()), servers: vec![] };
    assert_eq!(load(&options).await.unwrap().root_cert, Some(vec![certificate.der().to_vec()]));
    connect_to(file.path(), &[]).await.unwrap();
}

#[rstest]
#[case("token", "token: \"a\\nb\"")]
#[case("id-token", "auth-provider: {name: oidc, config: {id-token: \"a\\nb\"}}")]
#[case("as", "token: t, as: \"a\\nb\"")]
#[case("as-uid", "token: t, as: a, as-uid: \"a\\nb\"")]
#[case("as-groups", "token: t, as: a, as-groups: [\"a\\nb\"]")]
#[case("as-user-extra", "token: t, as: a, as-user-extra: {k: [\"a\\nb\"]}")]
#[tokio::test]
async fn credential_that_is_no_header_is_named(#[case] name: &str, #[case] user: &str) {
    let file = with_user("https://127.0.0.1:1", user);
    let error = connect_to(file.path(), &[]).await.err().expect("no header").to_string();
    assert!(error.starts_with(&format!("the {name} of the API server's user")), "{error}");
    let config = kubeconfig::read(Some(file.path()), &KubeConfigOptions::default()).await.unwrap();
    let error = chain(&connect::command_client(config).err().expect("no header"));
    assert!(error.contains(&format!("the {name} of")), "{error}");
}

#[tokio::test]
async fn basic_authentication_may_have_a_line_break() {
    let file = with_user("https://127.0.0.1:1", "username: \"a\\nb\", password: \"x\\n\"");
    connect_to(file.path(), &[]).await.unwrap();
}
