//! GetCapacity: the rows T2, T3, T18, T19, P34.

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{GetCapacityRequest, GetCapacityResponse, VolumeCapability};
use tonic::Code;

use crate::csi::case::Need::Rows;
use crate::csi::case::{CAPACITY, CREATE, cases};
use crate::csi::cx::{Answer, Cx, block, mounted_as, not_offered, one, range, refused, refused_as};

const MIB: i64 = 1 << 20;

cases! { [CAPACITY]
    capacity_is_not_negative;
    a_volume_takes_its_size_from_the_capacity_and_gives_it_back: CREATE, Rows;
    the_largest_volume_can_be_made: CREATE;
    the_smallest_volume_can_be_made: CREATE;
    the_smallest_volume_depends_on_its_file_system: Rows;
    capacity_for_what_is_unsupported_is_0_or_refused;
    capacity_of_an_unknown_class_is_refused: Rows;
    a_volume_as_large_as_the_capacity_is_accepted: CREATE, Rows;
}

fn ask(cx: &Cx<'_>, capability: Option<VolumeCapability>) -> Answer<GetCapacityResponse> {
    cx.driver.get_capacity(GetCapacityRequest {
        volume_capabilities: capability.into_iter().collect(),
        parameters: cx.options.parameters.clone(),
        ..Default::default()
    })
}

fn capacity_is_not_negative(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [None, Some(cx.mount(Mode::SingleNodeWriter))] {
        let answer = ask(cx, capability)?;
        ensure!(answer.available_capacity >= 0, "{answer:?}");
        ensure!(answer.maximum_volume_size.is_none_or(|size| size >= 0), "{answer:?}");
        ensure!(answer.minimum_volume_size.is_none_or(|size| size >= 0), "{answer:?}");
    }
    Ok(())
}

/// Row: T19.
fn a_volume_takes_its_size_from_the_capacity_and_gives_it_back(cx: &mut Cx<'_>) -> Result<()> {
    let before = ask(cx, None)?.available_capacity;
    let volume = cx.volume()?;
    let with = ask(cx, None)?.available_capacity;
    ensure!(before - with == volume.capacity_bytes, "{before}, then {with}");
    cx.delete(&volume.volume_id)?;
    let after = ask(cx, None)?.available_capacity;
    ensure!(after == before, "{before}, then {with}, then {after}");
    Ok(())
}

/// Row: P34.
fn the_largest_volume_can_be_made(cx: &mut Cx<'_>) -> Result<()> {
    let answer = ask(cx, Some(cx.mount(Mode::SingleNodeWriter)))?;
    let Some(largest) = answer.maximum_volume_size else {
        return not_offered("maximum_volume_size");
    };
    let request = cx.request_of(largest, 0);
    let volume = cx.create(&request).with_context(|| format!("{largest} bytes"))?;
    ensure!(volume.capacity_bytes >= largest, "{volume:?}");
    Ok(())
}

/// Row: P34.
fn the_smallest_volume_can_be_made(cx: &mut Cx<'_>) -> Result<()> {
    let answer = ask(cx, Some(cx.mount(Mode::SingleNodeWriter)))?;
    let Some(smallest) = answer.minimum_volume_size else {
        return not_offered("minimum_volume_size");
    };
    let request = cx.request_of(0, smallest);
    let volume = cx.create(&request).with_context(|| format!("{smallest} bytes"))?;
    ensure!(volume.capacity_bytes <= smallest, "{volume:?}");
    Ok(())
}

/// Row: P34.
fn the_smallest_volume_depends_on_its_file_system(cx: &mut Cx<'_>) -> Result<()> {
    let mode = Mode::SingleNodeWriter;
    for (capability, least) in [
        (block(mode), 8 * MIB),
        (mounted_as("ext4", mode), 32 * MIB),
        (mounted_as("xfs", mode), 300 * MIB),
        (mounted_as("btrfs", mode), 200 * MIB),
    ] {
        let answer = ask(cx, Some(capability.clone()))?;
        ensure!(answer.minimum_volume_size == Some(least), "{capability:?}: {answer:?}");
        ensure!(answer.maximum_volume_size.is_some(), "{capability:?}: {answer:?}");
    }
    Ok(())
}

/// Row: P34.
fn capacity_for_what_is_unsupported_is_0_or_refused(cx: &mut Cx<'_>) -> Result<()> {
    match ask(cx, Some(mounted_as("no-such-fs", Mode::SingleNodeWriter))) {
        Ok(answer) => ensure!(answer.available_capacity == 0, "{answer:?}"),
        answer => drop(refused(answer, Code::InvalidArgument)?),
    }
    Ok(())
}

/// Row: T21.
fn capacity_of_an_unknown_class_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let key = format!("{}/device-class", cx.offers().name);
    for key in [key.as_str(), "no-such-key"] {
        let parameters = one(key, "no-such-class");
        let request = GetCapacityRequest { parameters, ..Default::default() };
        refused(cx.driver.get_capacity(request), Code::InvalidArgument)?;
    }
    Ok(())
}

/// Row: T3.
fn a_volume_as_large_as_the_capacity_is_accepted(cx: &mut Cx<'_>) -> Result<()> {
    let free = ask(cx, None)?.available_capacity / 4096 * 4096;
    let mut request = cx.request();
    request.capacity_range = range(free, free);
    let volume = cx.create(&request)?;
    ensure!(volume.capacity_bytes == free, "{volume:?}");
    // Less than a volume is left.
    let request = cx.request();
    refused_as(cx.create(&request), &[Code::ResourceExhausted]).map(|_| ())
}
