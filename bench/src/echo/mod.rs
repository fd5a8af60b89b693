//! Which way to io_uring: a server that answers requests the size of NBD's with 4 KiB each, once on
//! a ring of its own and once on tokio-uring, for the same client at the same queue depth.

#[allow(unsafe_code, reason = "hands buffers to the kernel through io_uring")]
mod direct;
#[cfg(feature = "tokio-uring")]
mod runtime;

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::clock::{self, Clock};

/// Bytes of a request: those of NBD's.
pub(crate) const REQUEST_BYTES: usize = 28;
/// Bytes before the data of a reply: those of NBD's simple reply.
pub(crate) const HEADER_BYTES: usize = 16;
/// Bytes of data in a reply.
pub(crate) const DATA_BYTES: usize = 4096;
/// Bytes of a reply.
pub(crate) const REPLY_BYTES: usize = HEADER_BYTES + DATA_BYTES;
/// Requests in flight.
pub const DEPTH: usize = 32;

/// How a server is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// The `io-uring` crate: one receive and one send of a whole batch on one ring.
    Direct,
    /// tokio-uring, the same loop: `read`, then `writev` of a whole batch.
    Runtime,
    /// tokio-uring, a task for each request, as its examples have one for each connection.
    Tasks,
}

impl Way {
    /// All of them, the baseline first.
    pub const ALL: [Self; 3] = [Self::Direct, Self::Runtime, Self::Tasks];

    /// Its name in tables and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "io-uring",
            Self::Runtime => "tokio-uring",
            Self::Tasks => "tokio-uring, a task each",
        }
    }

    /// The way of this name.
    pub fn named(name: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|way| way.name() == name);
        found.with_context(|| format!("no such server: {name}"))
    }

    /// Whether this build has it.
    #[must_use]
    pub fn built(self) -> bool {
        self == Self::Direct || cfg!(feature = "tokio-uring")
    }
}

/// The results of one run.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Requests per second.
    pub rate: f64,
    /// Nanoseconds of CPU of the server per request, kernel's workers included.
    pub cpu_ns: f64,
}

/// Serves the socket that is our standard input until its client is gone, then prints the number of
/// answered requests and their cost.
pub fn serve(way: Way) -> Result<()> {
    let socket = std::io::stdin();
    let socket = std::os::fd::AsFd::as_fd(&socket).try_clone_to_owned()?;
    let requests = match way {
        Way::Direct => direct::serve(socket)?,
        #[cfg(feature = "tokio-uring")]
        Way::Runtime => runtime::serve(socket)?,
        #[cfg(feature = "tokio-uring")]
        Way::Tasks => runtime::serve_tasks(socket)?,
        #[cfg(not(feature = "tokio-uring"))]
        _ => bail!("not in this build: add --features tokio-uring"),
    };
    let cpu_ns = u64::try_from(clock::process_cpu()?.as_nanos())?;
    println!("{}", json!({ "requests": requests, "cpu_ns": cpu_ns }));
    Ok(())
}

/// A server in a process of its own, and our end of its socket.
#[derive(Debug)]
pub struct Server {
    child: Child,
    socket: UnixStream,
}

impl Server {
    /// Starts one.
    pub fn start(way: Way) -> Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new(std::env::current_exe()?)
            .args(["--serve", way.name()])
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .spawn()
            .context("start the server")?;
        Ok(Self { child, socket: ours })
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends requests for `seconds`, [`DEPTH`] in flight, each in a call of its own like most
    /// clients. Returns the number of replies.
    pub fn load(&mut self, seconds: f64) -> Result<u64> {
        let request = [0x25; REQUEST_BYTES];
        let mut buffer = vec![0; DEPTH * REPLY_BYTES];
        for _ in 0..DEPTH {
            self.socket.write_all(&request)?;
        }
        let clock = Clock::start();
        let (mut bytes, mut replies, mut in_flight) = (0, 0_u64, DEPTH);
        while in_flight > 0 {
            let more = self.socket.read(&mut buffer)?;
            ensure!(more > 0, "the server hung up");
            bytes += more;
            for _ in 0..bytes / REPLY_BYTES {
                replies += 1;
                if clock.seconds() < seconds {
                    self.socket.write_all(&request)?;
                } else {
                    in_flight -= 1;
                }
            }
            bytes %= REPLY_BYTES;
        }
        Ok(replies)
    }

    /// Ends it. Requests it has answered and nanoseconds of CPU it has used.
    pub fn end(mut self) -> Result<(u64, u64)> {
        drop(self.socket);
        let mut text = String::new();
        self.child.stdout.take().context("no output")?.read_to_string(&mut text)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the server: {status}");
        let value: Value = serde_json::from_str(&text).context("output of the server")?;
        let number = |name: &str| value[name].as_u64().with_context(|| format!("no {name}"));
        Ok((number("requests")?, number("cpu_ns")?))
    }
}

/// One run of `seconds`.
pub fn run(way: Way, seconds: f64) -> Result<Figures> {
    let mut server = Server::start(way)?;
    let clock = Clock::start();
    let replies = server.load(seconds)?;
    let elapsed = clock.seconds();
    let (requests, cpu_ns) = server.end()?;
    if requests != replies {
        bail!("{requests} requests answered, {replies} replies received");
    }
    Ok(Figures { rate: replies as f64 / elapsed, cpu_ns: cpu_ns as f64 / replies as f64 })
}
