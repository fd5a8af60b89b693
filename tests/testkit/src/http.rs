//! Requests to a metrics server.

use std::io::{Read, Write};

use anyhow::{Context, Result};

/// Requests a path on a connected stream, and returns the status and the body of the answer.
///
/// # Errors
/// When the connection breaks or the stream's time limit is over, and when the answer is not one
/// of HTTP.
pub fn get(mut stream: impl Read + Write, path: &str) -> Result<(u16, String)> {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).with_context(|| format!("waiting for {path}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer of HTTP")?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    Ok((status.with_context(|| format!("no status: {head}"))?, body.to_owned()))
}
