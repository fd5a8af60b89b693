//! `blockd send`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blockd_api::v1::{DiffVolumeRequest, GetVolumeRequest, RangeState, Volume};
use blockd_media::clock::Clock;
use blockd_media::error::Error;
use blockd_media::units;
use serde::Serialize;

use super::export::{Answer, Export, Stream};
use super::interruptible;
use super::remote::Remote;
use crate::client::Client;
use crate::duration::duration;
use crate::transfer::Stop;
use crate::transfer::increment::{Header, LEVELS, Position};
use crate::transfer::link::TlsArguments;
use crate::{Context, amount, answers, names};

/// The level of compression where none is given: that of zstd's own program.
const DEFAULT_LEVEL: i32 = 3;

/// Between two attempts to reach a receiver.
const PAUSE: Duration = Duration::from_millis(500);

/// Transfers in a row that begin where an earlier one did before a sender gives up. Each of them
/// may last long, and is cut off before the receiver has made anything durable.
const MOST_IN_VAIN: u32 = 10;

/// Send a snapshot to `blockd receive`, as a whole or since an earlier one
///
/// The stream has checksums, and names the snapshot and its base. It is that of `blockd export
/// --format backup`; it can also be kept as a file. A transfer that was cut off goes on with
/// --resume where `blockd receive --position` says; one over TCP does so by itself. There both
/// sides show certificates, unless the connection stays on this host.
#[derive(Debug, clap::Args)]
#[command(after_help = "Example:\n  \
                  blockd send data@monday | ssh HOST blockd receive copy\n  \
                  blockd send data@tuesday monday-to-tuesday --since data@monday --compress zstd\n  \
                  blockd send data@tuesday --since data@monday --dry-run")]
pub(crate) struct Send {
    /// The snapshot, NAME or POOL/NAME
    pub name: String,

    /// Where to: a file, "-" for standard output, or tcp://HOST:PORT of a `blockd receive
    /// --listen`, with /NAME where the volume has another name there
    #[arg(default_value = "-")]
    pub target: PathBuf,

    /// Only what has changed since this snapshot
    #[arg(long, value_name = "SNAPSHOT")]
    pub since: Option<String>,

    /// Compress the data: zstd, or zstd:LEVEL with a level from 1 to 19 [default level: 3]
    #[arg(long, value_name = "zstd[:LEVEL]", value_parser = level)]
    pub compress: Option<i32>,

    /// Go on from here: what `blockd receive --position` prints
    #[arg(long, value_name = "POSITION", value_parser = clap::value_parser!(Position))]
    pub resume: Option<Position>,

    /// Print how many bytes of data would be sent at most, and send nothing
    #[arg(long)]
    pub dry_run: bool,

    /// The pool that the snapshot is in [default: the daemon's default pool]
    #[arg(long, default_value = "", hide_default_value = true)]
    pub pool: String,

    /// Replace a file that is there already, once the new one is whole
    #[arg(long)]
    pub force: bool,

    /// How long to wait for a daemon or receiver that has gone away
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    pub reconnect: Duration,

    #[command(flatten)]
    pub tls: TlsArguments,
}

pub(super) fn level(text: &str) -> Result<i32, String> {
    let (name, level) = text.split_once(':').map_or((text, None), |(name, l)| (name, Some(l)));
    let level = level.map_or(Some(DEFAULT_LEVEL), |level| level.parse().ok());
    let level = level.filter(|level| name == "zstd" && LEVELS.contains(level));
    level.ok_or_else(|| "must be zstd, or zstd:LEVEL with a level from 1 to 19".to_owned())
}

/// The output of `--dry-run --json`.
#[derive(Debug, Serialize)]
struct Estimate {
    /// Bytes of data, before compression; zeroes among them are not sent.
    data_bytes: u64,
    since: Option<String>,
    resumed_at_bytes: u64,
}

impl Send {
    pub(crate) async fn run(mut self, context: &Context) -> Result<(), Error> {
        names::place(&mut self.pool, [&mut self.name].into_iter().chain(&mut self.since))?;
        let remote = match self.target.to_str() {
            Some(target) => Remote::parse(target, false, &self.tls)?,
            None => None,
        };
        if remote.is_some() && self.resume.is_some() {
            let allowed = "without --resume: the receiver says where to begin";
            return Err(Error::invalid("TARGET", self.target.display(), allowed));
        }
        let resume = self.resume.clone();
        let stream = Stream { resume, level: self.compress, remote, ..Stream::default() };
        let export = Export {
            since: self.since.clone(),
            force: self.force,
            ..Export::backup(&self.name, &self.target, &self.pool, self.reconnect)
        };
        if !self.dry_run {
            let answer = send(&export, context, &stream).await?;
            return export.say(context, &answer);
        }
        let mut client = context.client().await?;
        let request = GetVolumeRequest { name: self.name.clone(), pool: self.pool.clone() };
        let volume = answers::volume(client.get_volume(request).await?.volume)?;
        let mut header = export.header(&mut client, &volume).await?;
        stream.apply(&mut header)?;
        let data_bytes = data_bytes(&mut client, &volume, &header).await?;
        let resumed_at_bytes = header.from_bytes;
        let estimate = Estimate { data_bytes, since: self.since, resumed_at_bytes };
        context.output.either(&estimate, || {
            let size = context.output.size(data_bytes);
            let since =
                estimate.since.as_ref().map_or(String::new(), |one| format!(" since {one}"));
            format!("{}: at most {size} of data to send{since}\n", volume.name)
        })
    }
}

/// Sends the stream; again from where the receiver is, when the connection was cut off.
pub(super) async fn send(
    export: &Export,
    context: &Context,
    stream: &Stream,
) -> Result<Answer, Error> {
    let mut clock = Clock::start();
    loop {
        let sent = export.write(context, stream).await;
        let (Some(remote), Err(error)) = (&stream.remote, &sent) else { return sent };
        // Time with a connection does not count. Transfers that come no farther do.
        if remote.has_begun() {
            clock = Clock::start();
        }
        let is_over = clock.elapsed() >= export.reconnect || remote.in_vain() >= MOST_IN_VAIN;
        if !remote.is_cut() || is_over {
            return sent;
        }
        eprintln!("blockd: {error}; trying again");
        let stop = Arc::new(Stop::default());
        let pause = async {
            tokio::time::sleep(PAUSE).await;
            stop.check()
        };
        interruptible(&stop, pause).await?;
    }
}

/// Bytes of data that a stream has at most.
async fn data_bytes(client: &mut Client, volume: &Volume, header: &Header) -> Result<u64, Error> {
    let request = DiffVolumeRequest {
        name: volume.name.clone(),
        pool: volume.pool.clone(),
        since: header.base.as_ref().map_or(String::new(), |base| base.name.clone()),
        from_bytes: units::to_wire(header.from_bytes),
    };
    let mut stream = client.diff_volume(request).await?;
    let mut bytes = 0;
    while let Some(part) = client.next(&mut stream).await? {
        let data = part.ranges.iter().filter(|one| one.state() == RangeState::Data);
        bytes += data.map(|one| amount(one.length_bytes)).sum::<u64>();
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::level;

    #[test]
    fn a_level_of_compression_is_parsed() {
        assert_eq!(level("zstd"), Ok(3));
        assert_eq!(level("zstd:19"), Ok(19));
        for bad in ["", "gzip", "zstd:", "zstd:0", "zstd:20", "zstd:-1", "lz4:3"] {
            assert!(level(bad).is_err(), "{bad}");
        }
    }
}
