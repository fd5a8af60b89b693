//! A host loses its power while it writes and flushes. The other one takes its cell, and finds
//! everything that was flushed.

use std::time::Duration;

use anyhow::{Context, Result};

use super::blocks::FLUSHED;
use super::lab::Lab;
use super::rounds::Part;

/// A host writes for at least and at most this long.
const WRITES_MILLIS: std::ops::Range<u64> = 500..5_000;

/// Cuts the power of one of the hosts in each round; it boots again afterwards.
///
/// # Errors
/// When a write that was flushed is gone.
pub fn reset(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run)?;
    lab.serve()?;
    let (mut owner, mut slowest, mut writes) = (0, 0.0_f64, 0);
    part.each(|_, rng| {
        let victim = lab.give(owner, rng)?;
        let (other, id) = (1 - victim, victim + 1);
        lab.hosts[victim].ok("attach && blocks $VOLUME fill")?;
        lab.hosts[victim].send("blocks $VOLUME flushing")?;
        std::thread::sleep(Duration::from_millis(rng.u64(WRITES_MILLIS)));
        let said = lab.hosts[victim].cut()?;
        let last = said.lines().rev().find_map(|line| line.strip_prefix(FLUSHED));
        let last: u64 = last.context("no write was flushed")?.trim().parse()?;
        writes += last;
        slowest = slowest.max(lab.take_over(other)?);
        lab.hosts[other].ok(&format!("attach && blocks $VOLUME since {id} {last} && detach"))?;
        owner = other;
        lab.boot(victim)
    })?;
    lab.end()?;
    Ok(format!(
        "{} hosts reset under load: all that was flushed was there ({writes} writes in this run); \
         slowest takeover {slowest:.1} s",
        part.rounds
    ))
}
