//! The array loses its power while a host writes and flushes. One that keeps its reservations goes
//! on where it was, without an error; one that does not has no host that may write any more.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use super::blocks::FLUSHED;
use super::lab::Lab;
use super::rounds::Part;
use crate::vm::Which;

/// Writes with flushes until it is stopped, and keeps what it says and how it ends.
const WRITE: &str = "rm -f /tmp/stop /tmp/ended; (blocks $VOLUME flushing >/tmp/said 2>&1; \
                     echo $? >/tmp/ended) &";
/// Stops it.
const STOP: &str = "touch /tmp/stop; while ! [ -e /tmp/ended ]; do sleep 0.2; done; \
                    grep -v ^flushed /tmp/said; grep ^flushed /tmp/said | tail -1; \
                    [ $(cat /tmp/ended) = 0 ]";
/// A host writes for at least and at most this long before.
const WRITES_MILLIS: std::ops::Range<u64> = 500..5_000;
/// And this long afterwards: it looks for its key every 5 s.
const GOES_ON: Duration = Duration::from_secs(12);

/// Cuts the array's power in each round, and boots it again.
///
/// # Errors
/// When a write fails though the reservations are there, or goes on though they are not, or one
/// that was flushed is gone.
pub fn target_reset(part: &Part) -> Result<String> {
    let keeps = part.run.kernel == Which::Older;
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (mut owner, mut writes) = (0, 0);
    part.each(|_, rng| {
        let writer = lab.give(owner, rng)?;
        let (other, id) = (1 - writer, writer + 1);
        lab.hosts[writer].ok("attach && blocks $VOLUME fill")?;
        lab.hosts[writer].ok(WRITE)?;
        std::thread::sleep(Duration::from_millis(rng.u64(WRITES_MILLIS)));
        lab.reset_array()?;
        std::thread::sleep(GOES_ON);
        let ended = lab.hosts[writer].run(STOP)?;
        let last = ended.text.lines().rev().find_map(|line| line.strip_prefix(FLUSHED));
        let last: u64 = last.context("no write was flushed")?.trim().parse()?;
        writes += last;
        if keeps {
            if ended.status != 0 {
                let kept = lab.array.run("cat /keep/pr/*")?.text;
                let said =
                    lab.hosts[writer].run("dmesg | tail -30; tail -20 /var/log/blockd")?.text;
                bail!("writes of a host with its key: {}\n{kept}\n{said}", ended.text);
            }
            lab.hosts[writer].ok(&format!("blocks $VOLUME since {id} {last} && detach"))?;
            lab.hosts[writer].ok("blockd cell release vg/one")?;
            lab.hosts[other].ok("blockd cell take vg/one")?;
        } else {
            ensure!(ended.status != 0, "a host went on without its key");
            let listed = lab.hosts[writer].ok("blockd vg list")?;
            ensure!(listed.contains("fenced"), "the group of a host without its key: {listed}");
            for number in [writer, other] {
                lab.hosts[number].cut()?;
                lab.boot(number)?;
            }
            lab.hosts[other].ok("blockd cell take --fence vg/one")?;
        }
        let since = format!("attach && blocks $VOLUME since {id} {last} && detach");
        lab.hosts[other].ok(&since)?;
        owner = other;
        Ok(())
    })?;
    lab.end()?;
    let what = match keeps {
        true => "kept its reservations, and no write failed",
        false => "lost its reservations, and no write went on",
    };
    let rounds = part.rounds;
    Ok(format!(
        "the array lost its power {rounds} times, {what}; all of {writes} writes of this \
                run that were flushed were there"
    ))
}
