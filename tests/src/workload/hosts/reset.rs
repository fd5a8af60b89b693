//! A host loses its power while it writes and flushes. The other one takes its cell, and finds
//! everything that was flushed.

use anyhow::Result;

use super::lab::Lab;
use super::rounds::Part;

/// Cuts the power of one of the hosts in each round; it boots again afterwards.
///
/// # Errors
/// When a write that was flushed is gone, or the claim of a host that was fenced is watched.
pub fn reset(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (mut owner, mut waits, mut writes) = (0, part.waits()?, 0);
    part.each(|_, rng| {
        let victim = lab.give(owner, rng)?;
        let (other, id) = (1 - victim, victim + 1);
        let last = lab.cut_while_writing(victim, rng)?;
        writes += last;
        waits.push(lab.take_over(other)?)?;
        lab.hosts[other].ok("unwatched")?;
        lab.hosts[other].ok(&format!("attach && blocks $VOLUME since {id} {last} && detach"))?;
        owner = other;
        lab.boot(victim)
    })?;
    lab.end()?;
    Ok(format!(
        "{} hosts reset under load: all that was flushed was there ({writes} writes in this run); \
         takeover: {waits}",
        part.rounds
    ))
}
