//! The text of an HTTP request to an agent and of its answer. The answers are short and not chunked, so no client library is needed.

use std::net::SocketAddr;

/// Returns a GET request, after whose answer the server closes the connection.
pub fn request(host: SocketAddr, path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
}

/// Returns the status and the body of a whole answer. Error: the answer is not HTTP.
pub fn answer(mut answer: Vec<u8>) -> Result<(u16, Vec<u8>), &'static str> {
    // Only the status of the head is needed: `HTTP/1.1 200`.
    let status = answer.strip_prefix(b"HTTP/1.").and_then(|rest| rest.get(2..5));
    let status = status.and_then(|text| str::from_utf8(text).ok()).and_then(|text| text.parse().ok());
    let status = status.ok_or("the answer is not HTTP")?;
    let body = answer.windows(4).position(|end| end == b"\r\n\r\n").map_or(answer.len(), |end| end + 4);
    Ok((status, answer.split_off(body)))
}
