//! A host loses its power while it writes, and is declared dead by the other one: not while a
//! script fails, and then with everything that was flushed.

use anyhow::{Result, ensure};

use super::lab::Lab;
use super::rounds::Part;

/// Printed by the script that fails.
const FAILS: &str = "no power switch";

/// Cuts the power of one of the hosts in each round, and has the other one declare it dead. It
/// boots again afterwards, and is dead no more.
///
/// # Errors
/// When a cell was taken over though a script failed, or a write that was flushed is gone.
pub fn hooks(part: &Part) -> Result<String> {
    let mut lab = Lab::start(&part.run, part.rounds)?;
    lab.serve()?;
    let (mut owner, mut waits) = (0, part.waits()?);
    part.each(|_, rng| {
        let victim = lab.give(owner, rng)?;
        let (other, id) = (1 - victim, victim + 1);
        let last = lab.cut_while_writing(victim, rng)?;
        let survivor = &mut lab.hosts[other];
        let declare = format!("blockd node declare-dead vg/{id}");
        survivor.ok(&format!("hook 'echo {FAILS}; exit 3'"))?;
        let refused = survivor.run(&declare)?;
        let is_refused = refused.status == 7 && refused.text.contains(FAILS);
        ensure!(is_refused, "ended with {}: {}", refused.status, refused.text);
        survivor.ok(&format!("blockd cell list vg | grep -q 'on host {id}'"))?;
        survivor.ok("hook 'exit 0'")?;
        waits.push(survivor.seconds(&declare)?)?;
        survivor.ok("blockd cell list vg | grep -q free && blockd cell take vg/one")?;
        survivor.ok(&format!("attach && blocks $VOLUME since {id} {last} && detach"))?;
        owner = other;
        lab.boot(victim)?;
        lab.hosts[other].ok(&format!("returned vg/{id}")).map(|_| ())
    })?;
    lab.end()?;
    Ok(format!(
        "{} hosts declared dead, none while a script failed, and all that was flushed was there; \
         to declare one: {waits}",
        part.rounds
    ))
}
