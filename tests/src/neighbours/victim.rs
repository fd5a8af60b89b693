//! Well-behaved clients beside a neighbour, and their measurements.

use std::io::ErrorKind;
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blockd_nbd::client::ClientError;
use blockd_testkit::clock::Clock;
use clap::ValueEnum;
use nix::errno::Errno;
use serde::Serialize;

use super::client::{Client, FLUSH, Manner, READ, Request, WRITE};
use super::site::{Site, Transport, WRITTEN, spare};

/// Bytes of a request.
pub(super) const BLOCK: u64 = 4096;
/// A victim gives up on an operation after this time: well beyond what is allowed.
pub(super) const PATIENCE: Duration = Duration::from_secs(3);

/// The operation that a victim repeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Victim {
    /// Reads 4 KiB
    Read,
    /// Overwrites 4 KiB
    Write,
    /// Overwrites 4 KiB and flushes
    Flush,
    /// Writes 4 KiB where the pool has to allocate an extent
    FirstWrite,
    /// Connects, negotiates and reads 4 KiB
    Connect,
    /// Lists volumes and resizes one by the control socket
    Control,
    /// Gets /metrics and /readyz
    Metrics,
}

impl Victim {
    /// Its name on the command line.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The least time from one operation to the next. Calls that threads beside the workers answer
    /// are not made as fast as can be: then the kernel would share out the processors among these
    /// threads and the workers, which no scheduler of the daemon can change.
    const fn pace(self) -> Duration {
        match self {
            Self::Read | Self::Write | Self::Flush | Self::FirstWrite => Duration::ZERO,
            Self::Connect => Duration::from_millis(10),
            Self::Metrics => Duration::from_millis(20),
            Self::Control => Duration::from_millis(50),
        }
    }
}

/// The results of a client.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Figures {
    pub operations: u64,
    pub per_second: f64,
    /// The operation that took longest, also one that was given up.
    pub worst_ms: f64,
    /// Why the client stopped before its time.
    pub problem: Option<String>,
}

/// A client that is connected, if it has a connection of its own, and has not begun.
pub(super) struct Prepared<'a> {
    victim: Victim,
    site: &'a Site,
    transport: Transport,
    volume: &'static str,
    client: Option<Client>,
    random: fastrand::Rng,
    data: Vec<u8>,
}

impl<'a> Prepared<'a> {
    /// A client on a volume. It connects now, or with its first operation.
    ///
    /// # Errors
    /// When it can't connect.
    pub(super) fn new(
        victim: Victim,
        site: &'a Site,
        transport: Transport,
        volume: &'static str,
        connect: bool,
    ) -> Result<Self> {
        let mut client = Self {
            victim,
            site,
            transport,
            volume,
            client: None,
            random: fastrand::Rng::with_seed(1),
            data: vec![0x77; usize::try_from(BLOCK)?],
        };
        if connect
            && matches!(victim, Victim::Read | Victim::Write | Victim::Flush | Victim::FirstWrite)
        {
            client.client = Some(client.connect()?);
        }
        Ok(client)
    }

    fn connect(&self) -> Result<Client> {
        let address = self.site.address(self.transport);
        Client::open(address, self.volume, Manner::victim(PATIENCE))
    }

    /// Operations one after the other, for this long.
    pub(super) fn measure(mut self, window: Duration) -> Figures {
        let mut figures = Figures::default();
        let mut worst = Duration::ZERO;
        let start = Clock::start();
        while start.elapsed() < window {
            let begin = Clock::start();
            let result = self.operation();
            let took = begin.elapsed();
            worst = worst.max(took);
            if let Err(error) = result {
                figures.problem = Some(reason(&error));
                break;
            }
            figures.operations += 1;
            let rest = window.saturating_sub(start.elapsed());
            std::thread::sleep(self.victim.pace().saturating_sub(took).min(rest));
        }
        // Precise enough for what is compared.
        #[expect(clippy::cast_precision_loss, reason = "a count of operations within seconds")]
        let operations = figures.operations as f64;
        figures.per_second = operations / start.elapsed().max(window).as_secs_f64();
        figures.worst_ms = worst.as_secs_f64() * 1e3;
        figures
    }

    fn operation(&mut self) -> Result<()> {
        match self.victim {
            Victim::Read | Victim::Write | Victim::Flush | Victim::FirstWrite => self.io(),
            Victim::Connect => {
                self.client = Some(self.connect()?);
                self.request(READ, 0)?;
                self.client = None;
                Ok(())
            }
            Victim::Control => self.control(),
            Victim::Metrics => self.metrics(),
        }
    }

    fn io(&mut self) -> Result<()> {
        if self.client.is_none() {
            self.client = Some(self.connect()?);
        }
        let offset = self.random.u64(..WRITTEN / BLOCK) * BLOCK;
        match self.victim {
            Victim::Read => self.request(READ, offset),
            Victim::FirstWrite => self.request(WRITE, self.site.first()),
            Victim::Flush => {
                self.request(WRITE, offset)?;
                self.request(FLUSH, 0)
            }
            _ => self.request(WRITE, offset),
        }
    }

    fn request(&mut self, kind: u16, offset: u64) -> Result<()> {
        let client = self.client.as_mut().context("not connected")?;
        let data = &mut self.data;
        match kind {
            READ => client.ask(Request { kind, offset, len: BLOCK }, &[], data),
            WRITE => client.ask(Request { kind, offset, len: BLOCK }, data, &mut []),
            _ => client.ask(Request { kind, offset: 0, len: 0 }, &[], &mut []),
        }
    }

    fn control(&mut self) -> Result<()> {
        self.call(&["list", "--json"])?;
        let size = self.site.next_size().to_string();
        self.call(&["resize", "--size", &size, &spare(self.volume)])
    }

    fn call(&self, words: &[&str]) -> Result<()> {
        let mut command = self.site.verb(PATIENCE, words);
        let output = command.stdin(Stdio::null()).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "blockd {}: {said}", words.join(" "));
        Ok(())
    }

    fn metrics(&self) -> Result<()> {
        for path in ["/metrics", "/readyz"] {
            self.site.get(path, PATIENCE)?;
        }
        Ok(())
    }
}

/// Why an operation failed. The kernel's words for a time limit mislead.
fn reason(error: &anyhow::Error) -> String {
    let is_late = error.chain().any(|cause| {
        let kind = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        matches!(kind, Some(ErrorKind::WouldBlock | ErrorKind::TimedOut))
            || matches!(cause.downcast_ref::<ClientError>(), Some(ClientError::TimedOut))
            || cause.downcast_ref::<Errno>() == Some(&Errno::EAGAIN)
    });
    if is_late { format!("no answer within {PATIENCE:?}") } else { format!("{error:#}") }
}
