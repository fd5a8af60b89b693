//! The fake kernel's reaction to a written value.

use std::path::Path;

use super::State;
use super::region::{FakeClaim, FakeRegion, Info, KINDS};
use crate::platform::{Mode, PageMap};

/// Errors are numbers of the kernel.
type Answer = Result<(), i32>;

pub(super) fn write(state: &mut State, path: &Path, text: &str) -> Answer {
    let parts: Vec<String> =
        path.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    match parts.as_slice() {
        ["sys", "bus", "nd", "devices", region, device, name] => {
            let number = region.strip_prefix("region").and_then(|digits| digits.parse().ok());
            let found = state.regions.iter_mut().find(|one| Some(one.number) == number);
            attribute(found.ok_or(libc::ENOENT)?, device, name, text)
        }
        ["sys", "bus", "nd", "drivers", driver, "bind"] => bind(state, driver, text),
        ["sys", "bus", "nd", "drivers", _, "unbind"] => unbind(state, text),
        _ => Err(libc::ENOENT),
    }
}

/// `pfn0.1` is a word, a region and a number.
fn split(device: &str) -> Result<(&str, usize, u64), i32> {
    let at = device.find(|c: char| c.is_ascii_digit()).ok_or(libc::ENOENT)?;
    let (word, rest) = device.split_at(at);
    let (region, number) = rest.split_once('.').ok_or(libc::ENOENT)?;
    let parsed = region.parse().ok().zip(number.parse().ok()).ok_or(libc::ENOENT)?;
    Ok((word, parsed.0, parsed.1))
}

fn mode_of(word: &str) -> Result<Mode, i32> {
    KINDS.iter().find(|(_, own)| *own == word).map(|(mode, _)| *mode).ok_or(libc::ENOENT)
}

fn attribute(region: &mut FakeRegion, device: &str, name: &str, text: &str) -> Answer {
    let (word, _, number) = split(device)?;
    if word == "namespace" {
        return namespace(region, number, name, text);
    }
    let mode = mode_of(word)?;
    let is_it = |one: &&mut FakeClaim| one.mode == mode && one.number == number;
    let known: Vec<u64> =
        region.namespaces.iter().filter(|one| one.size > 0).map(|one| one.number).collect();
    let taken: Vec<u64> = region.claims.iter().filter_map(|one| one.namespace).collect();
    let claim = region.claims.iter_mut().find(is_it).ok_or(libc::ENOENT)?;
    if claim.bound {
        return Err(libc::EBUSY);
    }
    match name {
        "uuid" => text.clone_into(&mut claim.uuid),
        "mode" => {
            claim.map = match text {
                "pmem" => Some(PageMap::Device),
                "ram" => Some(PageMap::Memory),
                _ => return Err(libc::EINVAL),
            }
        }
        "align" => claim.align = text.parse().map_err(|_| libc::EINVAL)?,
        "sector_size" => claim.sector_size = text.parse().map_err(|_| libc::EINVAL)?,
        "namespace" if text.is_empty() => {
            let seed = FakeClaim {
                uuid: String::new(),
                map: None,
                sector_size: 0,
                namespace: None,
                ..claim.clone()
            };
            *claim = seed;
            drop_idle(region, mode);
        }
        "namespace" => {
            let (word, _, wanted) = split(text)?;
            if word != "namespace" || !known.contains(&wanted) {
                return Err(libc::ENODEV);
            }
            if claim.namespace.is_some() || taken.contains(&wanted) {
                return Err(libc::EBUSY);
            }
            claim.namespace = Some(wanted);
        }
        _ => return Err(libc::ENOENT),
    }
    Ok(())
}

/// Removes unused seeds, except one.
fn drop_idle(region: &mut FakeRegion, mode: Mode) {
    let seed = region.claim_seed(mode);
    region
        .claims
        .retain(|one| one.mode != mode || one.namespace.is_some() || Some(one.number) == seed);
}

fn namespace(region: &mut FakeRegion, number: u64, name: &str, text: &str) -> Answer {
    let is_claimed = region.claimer(number).is_some();
    let (gaps, align) = (region.gaps(), region.spec.align.unwrap_or(1));
    let labelled = region.spec.labelled;
    let one = region.named(number).ok_or(libc::ENOENT)?;
    if name == "force_raw" {
        one.force_raw = text == "1";
        return Ok(());
    }
    if one.bound || is_claimed {
        return Err(libc::EBUSY);
    }
    match name {
        "uuid" if labelled => text.clone_into(&mut one.uuid),
        "alt_name" if labelled && text.len() < 64 => text.clone_into(&mut one.alt_name),
        "size" if labelled => {
            let size: u64 = text.parse().map_err(|_| libc::EINVAL)?;
            if !size.is_multiple_of(align) {
                return Err(libc::EINVAL);
            }
            if one.uuid.is_empty() {
                return Err(libc::ENXIO);
            }
            if size == 0 {
                region.namespaces.retain(|one| one.number != number);
                region.add_seeds();
                return Ok(());
            }
            if one.size == 0 {
                let gap = gaps.iter().find(|gap| gap.1 >= size).ok_or(libc::ENOSPC)?;
                one.start = gap.0;
            } else if size > one.size {
                // The first that is large enough, be it in front.
                let (more, end) = (size - one.size, one.start + one.size);
                let is_near = |gap: &&(u64, u64)| gap.0 == end || gap.0 + gap.1 == one.start;
                let mut fitting = gaps.iter().filter(is_near).filter(|gap| gap.1 >= more);
                let gap = fitting.next().ok_or(libc::ENOSPC)?;
                if gap.0 != end {
                    one.start -= more;
                }
            }
            one.size = size;
        }
        _ => return Err(libc::EINVAL),
    }
    Ok(())
}

fn bind(state: &mut State, driver: &str, device: &str) -> Answer {
    let (word, region, number) = split(device)?;
    let region = state.regions.iter_mut().find(|one| one.number == region).ok_or(libc::ENODEV)?;
    if word == "namespace" {
        let is_busy = region.claimer(number).is_some();
        let one = region.named(number).ok_or(libc::ENODEV)?;
        if driver != "nd_pmem" || is_busy || one.size == 0 || one.bound {
            return Err(libc::ENODEV);
        }
        let probed = region.probe(number);
        region.add_seeds();
        return probed;
    }
    let mode = mode_of(word)?;
    if (mode == Mode::Devdax) != (driver == "dax_pmem") {
        return Err(libc::ENODEV);
    }
    let found = region.claims.iter().position(|one| one.mode == mode && one.number == number);
    let claim = &mut region.claims[found.ok_or(libc::ENODEV)?];
    let is_whole = match mode {
        Mode::Sector => claim.sector_size > 0,
        _ => claim.map.is_some(),
    };
    let Some(namespace) = claim.namespace.filter(|_| is_whole && !claim.uuid.is_empty()) else {
        return Err(libc::ENXIO);
    };
    claim.bound = true;
    let (map, align) = (claim.map.unwrap_or(PageMap::Memory), claim.align);
    let uuid = claim.uuid.clone();
    let one = region.named(namespace).ok_or(libc::ENXIO)?;
    let (start, parent, size) = (one.start, one.uuid.clone(), one.size);
    region.infos.insert(start, Info { mode, map, align, uuid, parent, size });
    region.add_seeds();
    Ok(())
}

fn unbind(state: &mut State, device: &str) -> Answer {
    let (word, region, number) = split(device)?;
    let region = state.regions.iter_mut().find(|one| one.number == region).ok_or(libc::ENODEV)?;
    let namespace = if word == "namespace" {
        number
    } else {
        let mode = mode_of(word)?;
        let found = region.claims.iter().find(|one| one.mode == mode && one.number == number);
        found.and_then(|one| one.namespace).ok_or(libc::ENODEV)?
    };
    let one = region.named(namespace).map(|one| one.clone()).ok_or(libc::ENODEV)?;
    let device = region.device_of(&one).ok_or(libc::ENODEV)?.0;
    if word == "namespace" {
        region.named(namespace).ok_or(libc::ENODEV)?.bound = false;
    } else {
        for claim in region.claims.iter_mut().filter(|one| one.namespace == Some(namespace)) {
            claim.bound = false;
        }
    }
    if state.mounts.contains_key(&device) || state.open.contains(&device) {
        state.torn.push(device);
    }
    Ok(())
}
