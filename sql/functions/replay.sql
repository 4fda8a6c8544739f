-- Makes a delivery due now and returns it as it then is, or nothing if the tenant has no such delivery. A finished one becomes
-- pending again with a full set of retries, and its attempt numbers go on; one that waits for a retry waits no longer; one that
-- is held stays as it is, and so does one that is being attempted, but the replay is noted for when that attempt has failed; one whose
-- job is lost is held, to get another. Its row is locked, so that any number of replays at once queue it only once.
create or replace function waybill.replay(tenant text, delivery uuid) returns setof waybill.deliveries language plpgsql
set plan_cache_mode = force_custom_plan
as $$
declare
  it record;
  is_finished boolean;
  is_hurried boolean;
  is_queued boolean;
  is_claimed boolean := false;
  moment timestamptz;
begin
  -- Retention also locks the event first, so whoever comes second sees what the first has done.
  with kept as materialized (
    select event_id from waybill.events where tenant_id = tenant
      and event_id = (select event_id from waybill.deliveries where tenant_id = tenant and delivery_id = delivery)
      -- The bounds are for the planner, which then looks at the partition between them only.
      and event_id between waybill.first_delivery_id(delivery) and waybill.last_delivery_id(delivery) for key share
  )
  -- `lines_up`: its endpoint may not take everything at once, so it waits in line like any other delivery.
  select d.endpoint_id, d.status, d.held, d.bundle, p.ordered,
    not p.is_active or p.ordered or p.max_per_second is not null or coalesce(s.breaker <> 'closed', false) as lines_up
  into it
  from kept join waybill.deliveries d using (event_id) join waybill.endpoints p using (tenant_id, endpoint_id)
  left join waybill.endpoint_stats s using (tenant_id, endpoint_id)
  where d.tenant_id = tenant and d.delivery_id = delivery for update of d;
  if not found then return; end if;
  -- The time of the transaction may lie before an attempt whose record this has waited for.
  moment := clock_timestamp();
  is_finished := it.status in ('delivered', 'dead_lettered');

  if is_finished then
    update waybill.deliveries set status = 'pending', held = it.lines_up, bundle = null, earlier_attempts = attempt_count, spent_retries = 0,
      dead_letter_reason = null, completed_at = null, next_attempt_at = case when not it.lines_up then moment end, updated_at = moment
    where tenant_id = tenant and delivery_id = delivery;
    perform waybill.count_deliveries(array[tenant, tenant], array[it.endpoint_id, it.endpoint_id], array[it.status, 'pending'], array[-1, 1]);
    if it.lines_up then perform waybill.count_held(array[tenant], array[it.endpoint_id], array[delivery]), pg_notify('waybill_held', ''); end if;
  end if;

  if it.held or is_finished and it.lines_up then
    perform waybill.probe_now(tenant, it.endpoint_id, delivery, it.ordered, false);
  else
    is_hurried := waybill.hurry(tenant, array[delivery]) is not null;
    -- A job that failed for good would swallow the new one, which has the same id.
    delete from pgboss.job where name = 'deliveries' and id = delivery and state > 'active';
    -- Looked up first: queueing it again would wait for whoever settles the job, who waits for this delivery.
    select count(*) > 0, coalesce(bool_or(state = 'active'), false) into is_queued, is_claimed
    from pgboss.job where name = 'deliveries' and id in (delivery, it.bundle);
    if it.lines_up and (is_hurried or is_queued and not is_claimed) then
      -- What was due already may stand far behind others: then the next probe is one that is held, or this one once it is.
      perform waybill.probe_now(tenant, it.endpoint_id, case when is_hurried then delivery end, it.ordered, is_hurried);
    end if;
    if is_finished and not is_queued then
      perform waybill.enqueue_one(tenant, delivery, tag), pg_notify('waybill_due', '') from waybill.queue_clock;
    elsif not is_queued then
      -- Its job is lost. Held, it comes back with the retries that it has left, and its attempt numbers go on.
      update waybill.deliveries set held = true, bundle = null, spent_retries = greatest(0, attempt_count - earlier_attempts), next_attempt_at = null,
        updated_at = moment
      where tenant_id = tenant and delivery_id = delivery;
      perform waybill.count_held(array[tenant], array[it.endpoint_id], array[delivery]), pg_notify('waybill_held', '');
    end if;
  end if;

  if is_claimed and not is_finished then
    insert into waybill.replay_requests values (tenant, delivery, moment)
    on conflict (tenant_id, delivery_id) do update set asked_at = excluded.asked_at;
  else
    delete from waybill.replay_requests where tenant_id = tenant and delivery_id = delivery;
  end if;
  return query select * from waybill.deliveries where tenant_id = tenant and delivery_id = delivery;
end $$;

-- Carries out a replay that was asked for during an attempt, unless that has succeeded, or another has been made since. One that lost its
-- worker is dated at the moment when that was found.
create or replace function waybill.replay_as_requested(tenant text, delivery uuid) returns void language plpgsql
set plan_cache_mode = force_custom_plan
as $$
declare
  request record;
begin
  -- One after the other: whoever comes second finds no request any more.
  perform pg_advisory_xact_lock(hashtext('waybill.replay_as_requested'), hashtext(delivery::text));
  -- Nor is its success recorded between the question and the replay. Locked as in a replay.
  perform from waybill.events where tenant_id = tenant
    and event_id = (select event_id from waybill.deliveries where tenant_id = tenant and delivery_id = delivery)
    and event_id between waybill.first_delivery_id(delivery) and waybill.last_delivery_id(delivery) for key share;
  perform from waybill.deliveries where tenant_id = tenant and delivery_id = delivery for update;
  select asked_at, d.status <> 'delivered' and (asked_at > coalesce(d.last_attempt_at, '-infinity') or d.last_error = 'worker_lost') as is_open
  into request
  from waybill.replay_requests r left join waybill.deliveries d using (tenant_id, delivery_id)
  where r.tenant_id = tenant and r.delivery_id = delivery;
  if request.is_open then
    perform waybill.replay(tenant, delivery);
  else
    delete from waybill.replay_requests where tenant_id = tenant and delivery_id = delivery and asked_at = request.asked_at;
  end if;
end $$;

-- Whoever asks for a replay believes that the endpoint answers again: if that is failing, and no probe is under way, this
-- delivery, or the first that is held if it is null, is the next probe, now. At an ordered endpoint, the one that all others wait
-- for is. `is_queued`: this delivery is in the queue, and need not be released.
create or replace function waybill.probe_now(tenant text, endpoint uuid, delivery uuid, is_ordered boolean, is_queued boolean)
returns void language plpgsql
set plan_cache_mode = force_custom_plan
as $$
begin
  if is_ordered then perform waybill.hurry_ordered(tenant, endpoint); end if;
  update waybill.endpoint_stats set
    probing = case when not is_ordered then delivery end,
    -- If it is queued, it is the probe: the next one comes after its outcome or, if there is none, later than most attempts take.
    next_probe_at = case when is_queued and not is_ordered then greatest(next_probe_at, now() + interval '1 minute')
      else least(next_probe_at, now()) end
  where tenant_id = tenant and endpoint_id = endpoint and breaker = 'open' and probing is null
    -- If an ordered endpoint's probe is due already, nothing is left to do: no counters are waited for with the delivery locked.
    and (not is_ordered or next_probe_at > now());
  if found then perform pg_notify('waybill_held', ''); end if;
end $$;
