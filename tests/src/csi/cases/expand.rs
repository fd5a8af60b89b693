//! ControllerExpandVolume.

use anyhow::{Context, Result, ensure};
use blockd_csi::proto::volume_capability::access_mode::Mode;
use blockd_csi::proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse,
    ControllerGetVolumeRequest, GetCapacityRequest,
};
use tonic::Code;

use crate::csi::case::Need::Rows;
use crate::csi::case::{CAPACITY, CREATE, EXPAND, GET, LIST, MODES, cases};
use crate::csi::cx::{Answer, Cx, block, range, refused, refused_as};

cases! { [CREATE, EXPAND]
    expand_without_id_is_invalid_argument;
    expand_without_a_range_is_invalid_argument;
    expand_without_a_range_comes_before_not_found;
    expand_of_an_unknown_volume_is_not_found;
    expand_gives_exactly_what_was_asked;
    expand_again_is_ok;
    expand_to_less_is_ok_and_changes_nothing;
    expand_below_what_it_has_by_limit_is_out_of_range;
    expand_by_a_negative_size_is_refused;
    expand_with_required_above_the_limit_is_refused;
    expand_to_a_size_that_overflows_is_refused;
    expand_to_a_size_that_cannot_be_exact_is_out_of_range: Rows;
    expand_to_an_odd_size_is_rounded_up_to_a_block: Rows;
    expand_accepts_every_known_mode: MODES;
    expand_for_what_is_unsupported_is_invalid_argument;
    an_expanded_volume_is_listed_with_its_size: LIST;
    an_expanded_volume_is_got_with_its_size: GET;
    an_expanded_volume_is_another_for_its_first_request;
    expand_takes_from_the_capacity_what_it_adds: CAPACITY, Rows;
    expand_beyond_what_there_is_is_refused_and_changes_nothing: CAPACITY, GET, Rows;
    a_mounted_volume_has_to_be_expanded_on_its_node: Rows;
}

fn expand(
    cx: &Cx<'_>,
    id: &str,
    capacity_range: Option<CapacityRange>,
) -> Answer<ControllerExpandVolumeResponse> {
    cx.driver.controller_expand_volume(ControllerExpandVolumeRequest {
        volume_id: id.to_owned(),
        capacity_range,
        ..Default::default()
    })
}

fn expand_without_id_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let larger = range(cx.options.size * 2, 0);
    refused(expand(cx, "", larger), Code::InvalidArgument).map(|_| ())
}

fn expand_without_a_range_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for none in [None, range(0, 0)] {
        refused(expand(cx, &volume.volume_id, none), Code::InvalidArgument)?;
    }
    Ok(())
}

fn expand_without_a_range_comes_before_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    refused(expand(cx, &gone, None), Code::InvalidArgument).map(|_| ())
}

fn expand_of_an_unknown_volume_is_not_found(cx: &mut Cx<'_>) -> Result<()> {
    let gone = cx.gone_volume()?;
    for id in [gone.as_str(), "nothing", "a/b", "../x", "🦀"] {
        refused(expand(cx, id, range(cx.options.size * 2, 0)), Code::NotFound)?;
    }
    Ok(())
}

fn expand_gives_exactly_what_was_asked(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for (step, limited) in [(1, false), (2, true), (3, false)] {
        let size = volume.capacity_bytes + step * (1 << 20);
        let wanted = range(size, if limited { size } else { 0 });
        let answer = expand(cx, &volume.volume_id, wanted)?;
        ensure!(answer.capacity_bytes == size, "{answer:?} for {size}");
    }
    Ok(())
}

fn expand_again_is_ok(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = volume.capacity_bytes * 2;
    let first = expand(cx, &volume.volume_id, range(size, 0))?;
    let again = expand(cx, &volume.volume_id, range(size, 0))?;
    ensure!(first == again, "{first:?} and {again:?}");
    Ok(())
}

fn expand_to_less_is_ok_and_changes_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let answer = expand(cx, &volume.volume_id, range(volume.capacity_bytes / 2, 0))?;
    ensure!(answer.capacity_bytes == volume.capacity_bytes, "{answer:?} of {volume:?}");
    Ok(())
}

fn expand_below_what_it_has_by_limit_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let half = volume.capacity_bytes / 2;
    refused(expand(cx, &volume.volume_id, range(half, half)), Code::OutOfRange).map(|_| ())
}

fn expand_by_a_negative_size_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for (required, limit) in [(-1, 0), (0, -1), (i64::MIN, i64::MIN)] {
        let answer = expand(cx, &volume.volume_id, range(required, limit));
        refused_as(answer, &[Code::InvalidArgument, Code::OutOfRange])?;
    }
    Ok(())
}

fn expand_with_required_above_the_limit_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = volume.capacity_bytes * 2;
    let answer = expand(cx, &volume.volume_id, range(size, size - 4096));
    refused_as(answer, &[Code::InvalidArgument, Code::OutOfRange]).map(|_| ())
}

/// Row: T11.
fn expand_to_a_size_that_overflows_is_refused(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    for size in [i64::MAX, i64::MAX - 4095, i64::MAX / 2 + 1] {
        let answer = expand(cx, &volume.volume_id, range(size, 0));
        refused_as(answer, &[Code::OutOfRange, Code::ResourceExhausted])?;
    }
    Ok(())
}

/// Row: T10.
fn expand_to_a_size_that_cannot_be_exact_is_out_of_range(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = volume.capacity_bytes * 2 + 1;
    refused(expand(cx, &volume.volume_id, range(size, size)), Code::OutOfRange).map(|_| ())
}

/// Row: T10.
fn expand_to_an_odd_size_is_rounded_up_to_a_block(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = volume.capacity_bytes * 2 + 1;
    let has = expand(cx, &volume.volume_id, range(size, 0))?.capacity_bytes;
    ensure!((size..size + 4096).contains(&has) && has % 512 == 0, "{has} for {size}");
    Ok(())
}

/// Row: W22.
fn expand_accepts_every_known_mode(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let modes = [Mode::SingleNodeWriter, Mode::SingleNodeSingleWriter, Mode::SingleNodeMultiWriter];
    for (step, mode) in (1..).zip(modes) {
        let size = volume.capacity_bytes + step * (1 << 20);
        let answer = cx.driver.controller_expand_volume(ControllerExpandVolumeRequest {
            volume_id: volume.volume_id.clone(),
            capacity_range: range(size, 0),
            volume_capability: Some(cx.mount(mode)),
            ..Default::default()
        })?;
        ensure!(answer.capacity_bytes == size, "{mode:?}: {answer:?} for {size}");
    }
    Ok(())
}

fn expand_for_what_is_unsupported_is_invalid_argument(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let mut without = cx.mount(Mode::SingleNodeWriter);
    without.access_mode = None;
    for capability in [cx.mount(Mode::Unknown), without] {
        let answer = cx.driver.controller_expand_volume(ControllerExpandVolumeRequest {
            volume_id: volume.volume_id.clone(),
            capacity_range: range(volume.capacity_bytes * 2, 0),
            volume_capability: Some(capability),
            ..Default::default()
        });
        refused(answer, Code::InvalidArgument)?;
    }
    Ok(())
}

fn an_expanded_volume_is_listed_with_its_size(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = volume.capacity_bytes * 2;
    expand(cx, &volume.volume_id, range(size, 0))?;
    let listed = cx.driver.all_volumes(0)?;
    let listed = listed.into_iter().find(|one| one.volume_id == volume.volume_id);
    let has = listed.context("it is not listed")?.capacity_bytes;
    ensure!(has == size, "{has} in place of {size}");
    Ok(())
}

fn got(cx: &Cx<'_>, id: &str) -> Result<i64> {
    let request = ControllerGetVolumeRequest { volume_id: id.to_owned() };
    let answer = cx.driver.controller_get_volume(request)?;
    Ok(answer.volume.context("no volume")?.capacity_bytes)
}

fn an_expanded_volume_is_got_with_its_size(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = volume.capacity_bytes * 2;
    expand(cx, &volume.volume_id, range(size, 0))?;
    let has = got(cx, &volume.volume_id)?;
    ensure!(has == size, "{has} in place of {size}");
    Ok(())
}

fn an_expanded_volume_is_another_for_its_first_request(cx: &mut Cx<'_>) -> Result<()> {
    let size = cx.options.size;
    let request = cx.request_of(size, size);
    let volume = cx.create(&request)?;
    expand(cx, &volume.volume_id, range(size * 2, 0))?;
    refused(cx.create(&request), Code::AlreadyExists).map(|_| ())
}

fn capacity(cx: &Cx<'_>) -> Result<i64> {
    let parameters = cx.options.parameters.clone();
    let request = GetCapacityRequest { parameters, ..Default::default() };
    Ok(cx.driver.get_capacity(request)?.available_capacity)
}

/// Row: T19.
fn expand_takes_from_the_capacity_what_it_adds(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let before = capacity(cx)?;
    expand(cx, &volume.volume_id, range(volume.capacity_bytes * 3, 0))?;
    let after = capacity(cx)?;
    ensure!(before - after == volume.capacity_bytes * 2, "{before}, then {after}");
    Ok(())
}

/// Row: T18.
fn expand_beyond_what_there_is_is_refused_and_changes_nothing(cx: &mut Cx<'_>) -> Result<()> {
    let volume = cx.volume()?;
    let size = (capacity(cx)? + volume.capacity_bytes) / 4096 * 4096 + (1 << 20);
    let answer = expand(cx, &volume.volume_id, range(size, 0));
    refused_as(answer, &[Code::ResourceExhausted, Code::OutOfRange])?;
    let has = got(cx, &volume.volume_id)?;
    ensure!(has == volume.capacity_bytes, "{has} after a refusal");
    Ok(())
}

fn a_mounted_volume_has_to_be_expanded_on_its_node(cx: &mut Cx<'_>) -> Result<()> {
    for capability in [None, Some(cx.mount(Mode::SingleNodeWriter))] {
        let volume = cx.volume()?;
        let answer = cx.driver.controller_expand_volume(ControllerExpandVolumeRequest {
            volume_id: volume.volume_id.clone(),
            capacity_range: range(volume.capacity_bytes * 2, 0),
            volume_capability: capability,
            ..Default::default()
        })?;
        ensure!(answer.node_expansion_required, "{answer:?}");
    }
    let request = cx.block_request();
    let volume = cx.create(&request)?;
    cx.driver.controller_expand_volume(ControllerExpandVolumeRequest {
        volume_id: volume.volume_id.clone(),
        capacity_range: range(volume.capacity_bytes * 2, 0),
        volume_capability: Some(block(Mode::SingleNodeWriter)),
        ..Default::default()
    })?;
    Ok(())
}
