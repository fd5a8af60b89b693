//! Connections with a number, so that a recording shows which calls came from one caller.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::transport::server::Connected;

/// The number of a connection, from 1, in requests that came over it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Connection(pub(crate) u64);

/// A connection and its number.
#[derive(Debug)]
pub(crate) struct Numbered {
    stream: UnixStream,
    number: u64,
}

/// Accepts connections and numbers them.
pub(crate) fn incoming(listener: UnixListener) -> impl Stream<Item = io::Result<Numbered>> {
    let mut number = 0;
    UnixListenerStream::new(listener).map(move |accepted| {
        number += 1;
        accepted.map(|stream| Numbered { stream, number })
    })
}

impl Connected for Numbered {
    type ConnectInfo = Connection;

    fn connect_info(&self) -> Connection {
        Connection(self.number)
    }
}

impl AsyncRead for Numbered {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Numbered {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
