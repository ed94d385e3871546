//! Large transfers: segments that are not cut yet, and packets that fill the link.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};

use super::objects::MANY;
use super::{is_direct, vip};
use crate::nodes::{Nodes, pod_ip};
use crate::peer::SocketKind;
use proxy_testbed::Family;
use proxy_testbed::space::Space;

/// Size of a transfer in bytes.
const BYTES: usize = 64 << 20;
/// Timeout of each step of a transfer.
const PATIENCE: Duration = Duration::from_mins(1);

/// Serves one upload and one download of [`BYTES`] in a thread of `space`; the thread returns the sum of all bytes.
fn serve(space: &Space, at: SocketAddr) -> Result<JoinHandle<Result<usize>>> {
    let listener = space.inside(|| Ok(TcpListener::bind(at)?))?;
    Ok(std::thread::spawn(move || {
        let (mut stream, _) = listener.accept()?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut buffer = vec![0; BYTES];
        stream.read_exact(&mut buffer).context("the upload")?;
        stream.write_all(&buffer).context("the download")?;
        Ok(buffer.iter().map(|byte| usize::from(*byte)).sum())
    }))
}

/// Uploads and downloads [`BYTES`], and compares them.
fn transfer(nodes: &Nodes, family: Family) -> Result<()> {
    let servers = [1, 2].map(|at| {
        let node = &nodes.all[at];
        serve(node.pod_space(0), (pod_ip(family, at as u8 + 1, 2), MANY).into())
    });
    let (sum, sent) = nodes.clients[0].inside(|| {
        let mut stream = TcpStream::connect_timeout(&(vip(family), MANY).into(), PATIENCE)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let data: Vec<u8> = (0..BYTES).map(|at| (at % 251) as u8).collect();
        stream.write_all(&data).context("the upload")?;
        let mut back = vec![0; BYTES];
        stream.read_exact(&mut back).context("the download")?;
        ensure!(back == data, "what came back differs");
        Ok((back.iter().map(|byte| usize::from(*byte)).sum::<usize>(), data.len()))
    })?;
    ensure!(sent == BYTES);
    // One server has served the client; the other one still waits for a connection.
    let mut served = 0;
    for (at, server) in (2..).zip(servers) {
        let server = server?;
        if !server.is_finished() {
            drop(nodes.all[0].space.inside(|| Ok(TcpStream::connect((pod_ip(family, at, 2), MANY))?)));
        }
        let found = server.join().map_err(|_| anyhow!("a thread died"))?;
        served += usize::from(found.is_ok_and(|found| found == sum));
    }
    ensure!(served == 1, "{served} endpoints had all bytes");
    Ok(())
}

/// Tests transfers in both families: at first the devices pass segments uncut, and then segments are cut before the
/// first node, as by a NIC without offloads.
pub fn with_and_without_offloads(nodes: &mut Nodes) -> Result<()> {
    for family in Family::BOTH {
        let to = super::orig_dst(family, SocketKind::Tcp)[0];
        is_direct(nodes, SocketKind::Tcp, to)?;
        transfer(nodes, family).with_context(|| format!("{family:?}"))?;
    }
    for (space, device) in nodes.clients[..1]
        .iter()
        .map(|space| (space, "eth0"))
        .chain(nodes.all.iter().map(|node| (&node.space, "eth0")))
    {
        let output = space.command("ethtool").args(["-K", device, "tso", "off", "gso", "off"]).output()?;
        ensure!(output.status.success(), "ethtool: {}", String::from_utf8_lossy(&output.stderr));
    }
    for family in Family::BOTH {
        transfer(nodes, family).with_context(|| format!("{family:?}, without offloads"))?;
    }
    Ok(())
}
