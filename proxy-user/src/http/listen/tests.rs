use std::net::Ipv4Addr;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;
use tokio::time::{sleep, timeout};

use super::*;
use crate::driver::Status;
use crate::http::health_router;
use crate::http::tests::state;

const FLOOD: u8 = 9;
const PROBE: u8 = 1;

#[expect(clippy::unused_async, reason = "its listener needs the runtime")]
async fn start(limit: usize) -> (SocketAddr, Connections) {
    let listener = open((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Connections::new(limit);
    let serving = connections.clone();
    tokio::spawn(async move {
        let router = health_router(state(Status { synced: true, complete: true, ..Status::default() }));
        serving.serve(&listener, &router).await;
    });
    (address, connections)
}

/// Connects from 127.0.0.`last`.
async fn connect(last: u8, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind((Ipv4Addr::new(127, 0, 0, last), 0).into())?;
    socket.connect(to).await
}

async fn ask(stream: &mut TcpStream, path: &str) -> String {
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = [0; 15];
    stream.read_exact(&mut answer).await.unwrap();
    let mut rest = [0; 4096];
    let _ = stream.read(&mut rest).await.unwrap();
    String::from_utf8_lossy(&answer).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_and_slow_connections_delay_no_probe() {
    let most = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most }).unwrap();
    let (address, connections) = start(256).await;
    let mut kept = connect(PROBE, address).await.unwrap();
    assert_eq!(ask(&mut kept, "/livez").await, "HTTP/1.1 200 OK");
    let mut flood = Vec::new();
    for number in 0..10_000 {
        let mut stream = connect(FLOOD, address).await.unwrap();
        if number % 2 == 0 {
            let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nHost").await;
        }
        flood.push(stream);
        if number % 500 == 0 {
            for path in ["/livez", "/healthz", "/readyz"] {
                let answer = timeout(Duration::from_secs(5), async {
                    ask(&mut connect(PROBE, address).await.unwrap(), path).await
                });
                assert_eq!(answer.await.unwrap(), "HTTP/1.1 200 OK", "{path} after {number}");
            }
        }
    }
    assert_eq!(ask(&mut kept, "/livez").await, "HTTP/1.1 200 OK", "the flood ends only its own connections");
    assert!(connections.lock().count <= 256 / OF_A_CLIENT + 70, "{}", connections.lock().count);
    drop(flood);
    drop(kept);
    for _ in 0..500 {
        if connections.lock().count == 0 {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
    let open = connections.lock();
    assert_eq!((open.count, open.of_clients.len()), (0, 0));
}

#[tokio::test]
async fn client_with_most_connections_loses_one_at_the_limit() {
    let (address, connections) = start(8).await;
    let mut small = connect(PROBE, address).await.unwrap();
    assert_eq!(ask(&mut small, "/livez").await, "HTTP/1.1 200 OK");
    let mut streams = Vec::new();
    for round in 0..20u8 {
        for client in 10..14 {
            let mut stream = connect(client, address).await.unwrap();
            assert_eq!(ask(&mut stream, "/livez").await, "HTTP/1.1 200 OK", "round {round}");
            streams.push(stream);
        }
    }
    assert_eq!(ask(&mut small, "/livez").await, "HTTP/1.1 200 OK");
    assert!(connections.lock().count <= 8);
}

#[test]
fn oldest_connection_is_lost_if_each_client_has_one() {
    let connections = Connections::new(4);
    let address = |last: u8| IpAddr::from([10, 0, 0, last]);
    let slots: Vec<_> = [1, 2, 3, 9, 4, 5].map(|last| connections.admit(address(last))).into();
    let left: Vec<_> = connections.lock().of_clients.keys().copied().collect();
    assert_eq!(left, [3, 4, 5, 9].map(address));
    drop(slots);
    assert_eq!(connections.lock().count, 0);
}

#[test]
fn addresses_of_one_ipv6_network_are_one_client() {
    let client = |text: &str| client_of(text.parse().unwrap());
    assert_eq!(client("2001:db8::1"), client("2001:db8::ffff:1"));
    assert_ne!(client("2001:db8::1"), client("2001:db8:0:1::1"));
    assert_eq!(client("::ffff:10.0.0.1"), IpAddr::from([10, 0, 0, 1]));
    assert_ne!(client("::ffff:10.0.0.2"), IpAddr::from([10, 0, 0, 1]));
}

#[tokio::test]
async fn the_unspecified_address_stands_for_both_families() {
    for any in ["0.0.0.0:0", "[::]:0"] {
        let listener = open(any.parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "::1"] {
            let host: IpAddr = host.parse().unwrap();
            let stream = TcpStream::connect((host, port)).await;
            assert!(stream.is_ok(), "{any} {host}: {stream:?}");
            let (_, client) = listener.accept().await.unwrap();
            assert_eq!(client.ip().to_canonical(), host);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_sends_no_request_is_closed() {
    let (address, connections) = start(8).await;
    let mut stream = connect(PROBE, address).await.unwrap();
    let _ = stream.write_all(b"GET /livez HTTP/1.1\r\n").await;
    let begun = tokio::time::Instant::now();
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(begun.elapsed() <= REQUEST_TIMEOUT + Duration::from_secs(1));
    assert_eq!(connections.lock().count, 0);
}
